"""What cannot work is refused on every rank before anything is touched, in words that say what would work."""

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import models
import partbook.dialects.deepspeed as on_deepspeed
import partbook.dialects.pytorch as on_pytorch
from partbook.core import AgreementError, PartbookError, ScheduleError
from ranks import on_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def start_deepspeed(model: nn.Module, **given: Any) -> Any:
    arguments = {"schedule": "gpt2", "tp": 2, "config": CONFIG, "model_parameters": list(model.parameters())}
    return on_deepspeed.initialize(model=model, **{**arguments, **given})[0]


def start_pytorch(model: nn.Module, **given: Any) -> nn.Module:
    return on_pytorch.initialize(model, **{"schedule": "gpt2", "tp": 2, **given})[0]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(**models.batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


# what is wrong -> the call, its arguments made from the model, the error, its message
DEEPSPEED: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "tp that does not divide the world": (
        lambda model: {"tp": 3}, ValueError, r"tp=3 does not divide the world size 2; tp could be one of \[1, 2\]"),
    "tp below 1": (lambda model: {"tp": 0}, ValueError, r"tp=0 does not divide .* one of \[1, 2\]"),
    "an mpu of the user's": (
        lambda model: {"mpu": object()}, ValueError, "Partbook makes the mpu out of tp: leave out mpu and mesh_param"),
    "an optimizer with state": (
        lambda model: {"optimizer": stepped(model), "config": {"train_micro_batch_size_per_gpu": 4}}, ValueError,
        "the optimizer has made steps already"),
    "an unknown schedule": (lambda model: {"schedule": "gtp2"}, ValueError, "no schedule 'gtp2'; did you mean 'gpt2'"),
    "another family's schedule": (
        lambda model: {"schedule": "llama"}, ScheduleError,
        r"'llama' is for LlamaForCausalLM, .*, not for GPT2LMHeadModel\n.*for GPT2LMHeadModel there is \['gpt2'\]"),
    "an unknown option": (
        lambda model: {"schedule_args": {"fuse": True}}, ValueError, "'gpt2' has no option 'fuse'; .*'fuse_qkv'"),
    "contradicting batch sizes": (
        lambda model: {"config": {**CONFIG, "train_batch_size": 8, "gradient_accumulation_steps": 1}},
        on_deepspeed.ConfigError, r"train_batch_size=8, but .*=4 \* .*=1 \* dp=1 = 4 \(dp = 2 ranks / tp=2\)"),
    "AutoTP too": (
        lambda model: {"config": {**CONFIG, "tensor_parallel": {"autotp_size": 2}}}, on_deepspeed.ConfigError,
        "DeepSpeed's own AutoTP"),
    "bf16 without ZeRO": (
        lambda model: {"config": {**CONFIG, "bf16": {"enabled": True}}}, on_deepspeed.ConfigError,
        'bf16 with ZeRO stage 0 trains wrongly.*\n.*"stage": 1'),
}  # fmt: skip


def assert_untouched(model: nn.Module, before: dict[str, Tensor], parameters: list[nn.Parameter]) -> None:
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert type(model).__name__ == type(model).__qualname__
    assert not any("_partbook_plan" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("wrong", DEEPSPEED)
@on_ranks(2)
def test_deepspeed_refuses_before_it_touches_anything(rank, wrong):
    make_arguments, error, message = DEEPSPEED[wrong]
    model = models.gpt2()
    arguments = make_arguments(model)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    with pytest.raises(error, match=message):
        start_deepspeed(model, **arguments)
    assert_untouched(model, before, parameters)
    # and what was right in the call still works
    start_deepspeed(model)


PYTORCH: dict[str, tuple[dict[str, Any], str]] = {
    "tp that does not divide the world": ({"tp": 3}, r"tp=3 does not divide the world size 4.* one of \[1, 2, 4\]"),
    "another family's schedule": ({"schedule": "gpt2"}, r"not for LlamaForCausalLM\n.*there is \['llama'\]"),
    "a fused QKV with shared heads": (
        {"tp": 4, "schedule_args": {"fuse_qkv": True}},
        r"self_attn(.|\n)*2 key-value heads are shared by tp=4 ranks(.|\n)*fuse_qkv=False"),
    "an option of another type": (
        {"schedule_args": {"fuse_qkv": 3}}, "option fuse_qkv=3 of schedule 'llama' is no bool"),
    "a ratio above 1": ({"schedule_args": {"checkpoint_ratio": 1.5}}, "checkpoint_ratio=1.5 is not between 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", PYTORCH)
@on_ranks(4)
def test_pytorch_refuses_before_it_touches_anything(rank, wrong):
    given, message = PYTORCH[wrong]
    model = models.llama()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    with pytest.raises(ValueError, match=message):
        start_pytorch(model, **{"schedule": "llama", **given})
    assert_untouched(model, before, parameters)


@pytest.mark.parametrize("kv_heads", [2, 4])
@on_ranks(3)
def test_heads_that_do_not_divide_are_refused_by_module(rank, kv_heads):
    model = models.llama(kv_heads=kv_heads)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    with pytest.raises(ScheduleError, match=r"model.layers.0.self_attn(.|\n)*4 attention heads do not divide by tp=3"):
        start_pytorch(model, schedule="llama", tp=3)
    assert_untouched(model, before, parameters)


@pytest.mark.parametrize("start", [start_pytorch, start_deepspeed])
@on_ranks(2)
def test_a_model_on_the_meta_device_needs_weights(rank, start):
    with torch.device("meta"):
        model = models.gpt2()
    with pytest.raises(ValueError, match=r"the model is on the meta device: pass weights= \(a folder, a dense model"):
        start(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any("_partbook_plan" in module.__dict__ for module in model.modules())
    # the same object, with weights
    dense = models.gpt2()
    run = start(model, weights=dense)
    wanted = dense(**models.batch()).loss
    torch.testing.assert_close(run(**models.batch()).loss, wanted, rtol=1e-5, atol=0)


@on_ranks(2)
def test_parameters_that_zero_3_has_partitioned_cannot_be_split(rank):
    with deepspeed.zero.Init(config_dict_or_path={**CONFIG, "zero_optimization": {"stage": 3}}):
        model = nn.Linear(4, 4)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    with pytest.raises(PartbookError, match=r"partitioned already \(deepspeed.zero.Init\).*\n.*outside of zero.Init"):
        start_deepspeed(model)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())


def as_batch(rank: int, what: str) -> dict[str, Any]:
    """A batch that differs between the two ranks of the second tp group, in ``what`` only."""
    batch: dict[str, Any] = models.batch(seed=rank // 2)
    if rank == 3:
        if what == "length":
            batch = {name: value[:, :8] for name, value in batch.items()}
        elif what == "attention_mask":
            batch[what] = torch.ones_like(batch["input_ids"])
        else:
            batch[what][0, 0] += 1
    return batch


@pytest.mark.parametrize("start", [start_pytorch, start_deepspeed])
@on_ranks(4)
def test_ranks_that_see_different_batches_are_told_so(rank, start):
    """By all ranks of the tp group, naming argument and ranks; the other group is right and goes on."""
    for what in ("input_ids", "labels", "attention_mask", "length"):
        run = start(models.gpt2())
        batch = as_batch(rank, what)
        if rank < 2:
            with torch.no_grad():
                assert run(**batch).loss.isfinite()
            continue
        with pytest.raises(AgreementError, match="the ranks of one tp group must see the same batches") as error:
            run(**batch)
        text = str(error.value)
        assert ("input_ids" if what == "length" else what) in text.partition(" differs ")[0]
        assert "(rank 2: " in text
        assert ", rank 3: " in text
        assert ("rank 2: nothing" in text) == (what == "attention_mask")
        assert "num_replicas=2, rank=<global rank> // 2" in text


@on_ranks(2)
def test_batches_are_compared_in_training_and_in_evaluation(rank):
    model = start_pytorch(models.gpt2())
    same, mine = models.batch(), models.batch(seed=rank)
    model(**same)
    with pytest.raises(AgreementError, match="input_ids"):
        model.eval()(**mine)
    # later ones cost nothing
    hooks = len(model._forward_pre_hooks)
    assert hooks == 0


@on_ranks(2)
def test_a_model_is_scheduled_once(rank):
    model = models.gpt2()
    start_pytorch(model)
    with pytest.raises(ScheduleError, match=r"this GPT2LMHeadModel has been scheduled before(.|\n)*a fresh model"):
        start_deepspeed(model)
    model(**models.batch()).loss.backward()
