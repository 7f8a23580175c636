"""Plain PyTorch: a scheduled model trains exactly as the untouched one in one process, in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from partbook.core import Mesh, consolidate, gradients, verify
from partbook.dialects.pytorch import clip_grad_norm_, initialize
from ranks import on_ranks

SP = {"sequence_parallel": True}
FUSED = {"fuse_qkv": True}
BIASED = {"attention_bias": True, "mlp_bias": True}

# family, what its model is built with, options of the schedule, tp
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "gpt2": ("gpt2", {}, {}, 2),
    "gpt2 untied": ("gpt2", {"tied": False}, SP, 2),
    "gpt2 vocabulary divides": ("gpt2", {"vocab": 64}, FUSED, 2),
    "gpt2 sequence parallel": ("gpt2", {}, SP, 2),
    "gpt2 fused": ("gpt2", {"tied": False}, FUSED, 2),
    "gpt2 all options": ("gpt2", {}, {**SP, **FUSED, "checkpoint_ratio": 0.5}, 2),
    "gpt2 checkpointed": ("gpt2", {}, {"checkpoint_ratio": 1.0}, 2),
    "gpt2 tp 4": ("gpt2", {}, SP, 4),
    "gpt2 one rank holds only padding": ("gpt2", {"vocab": 9}, {}, 4),
    "llama": ("llama", {}, {}, 2),
    "llama tied": ("llama", {"tied": True}, SP, 2),
    "llama vocabulary divides": ("llama", {"vocab": 64}, {"checkpoint_ratio": 0.5}, 2),
    "llama fused": ("llama", BIASED, FUSED, 2),
    "llama gate and up fused": ("llama", BIASED, {**FUSED, "fuse_gate_up": True, "checkpoint_ratio": 0.5}, 2),
    "llama all options": ("llama", {"tied": True}, {**SP, **FUSED, "fuse_gate_up": True, "checkpoint_ratio": 1.0}, 2),
    "llama biases": ("llama", BIASED, {}, 2),
    "llama biases, sequence parallel": ("llama", BIASED, SP, 2),
    "llama one kv head": ("llama", {"kv_heads": 1, **BIASED}, {}, 2),
    "llama one kv head, sequence parallel": ("llama", {"kv_heads": 1}, {**SP, "checkpoint_ratio": 1.0}, 2),
    "llama 2 kv heads, tp 4": ("llama", BIASED, {}, 4),
    "llama padding row on rank 0": ("llama", {"pad_token_id": 0}, {}, 2),
    "llama padding row on rank 1": ("llama", {"pad_token_id": 98, "tied": True}, {}, 2),
    "qwen2": ("qwen2", {}, {**SP, **FUSED}, 2),
    "qwen2 tied, one kv head": ("qwen2", {"tied": True, "kv_heads": 1}, {}, 2),
    "mistral": ("mistral", {}, {**SP, "checkpoint_ratio": 0.5}, 2),
}


def check(family: str, built_with: dict[str, Any], options: dict[str, Any], tp: int, padded: bool = False) -> None:
    """5 AdamW steps, clipped: losses, all gradients of the first, norms, outputs, parameters after the last."""
    model = getattr(models, family)(**built_with)
    vocab = built_with.get("vocab", models.VOCABULARY)
    batches = [models.batch(vocab=vocab, seed=seed, padded=padded) for seed in range(5)]
    mesh = Mesh(dp=dist.get_world_size() // tp, tp=tp)
    schedule = "gpt2" if family == "gpt2" else "llama"
    before = copy.deepcopy(model.state_dict())
    report = verify(model, schedule, mesh, batches, schedule_args=options, steps=5, dtype=torch.float64, max_norm=0.5)
    assert report.ok, str(report)
    assert report.worst("loss").tolerance == 1e-9
    compared = {difference.name for difference in report.differences if difference.what == "gradient"}
    assert compared == {name for name, _ in model.named_parameters()}
    compared = {difference.name for difference in report.differences if difference.what == "parameter"}
    assert compared == set(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"verify changed {name} of the user's model"


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[3] == 2])
@on_ranks(2)
def test_tp_2_equals_the_dense_model(rank, case):
    check(*CASES[case])


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[3] == 4])
@on_ranks(4)
def test_tp_4_equals_the_dense_model(rank, case):
    check(*CASES[case])


@pytest.mark.parametrize(("family", "options"), [("gpt2", {**SP, **FUSED}), ("llama", {})])
@on_ranks(2)
def test_padding_masks_reach_every_rank(rank, family, options):
    check(family, {}, options, tp=2, padded=True)


@pytest.mark.parametrize(("family", "options"), [("gpt2", {}), ("llama", {**SP, **FUSED, "checkpoint_ratio": 0.5})])
@on_ranks(4)
def test_tp_2_dp_2_equals_the_dense_model(rank, family, options):
    check(family, {}, options, tp=2)


def dense_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By hand: next-token cross-entropy in the model's own dtype (transformers casts the logits to float32)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize(
    ("family", "built_with", "options", "optimizer"),
    [
        ("gpt2", {}, {**SP, "checkpoint_ratio": 0.5}, torch.optim.AdamW),
        ("llama", {"kv_heads": 1}, {}, torch.optim.SGD),
        ("llama", BIASED, {**SP, **FUSED}, torch.optim.AdamW),
    ],
)
@on_ranks(4)
def test_training_equals_a_loop_written_by_hand(rank, family, built_with, options, optimizer):
    """Nothing of ``verify`` is used: tp 2 x dp 2 under DistributedDataParallel against one dense model."""
    settings = {"lr": 1e-2, "eps": 1e-5} if optimizer is torch.optim.AdamW else {"lr": 0.5}
    dense = getattr(models, family)(**built_with).double()
    model = copy.deepcopy(dense)
    schedule = "gpt2" if family == "gpt2" else "llama"
    module, scheduled = initialize(model, schedule, options, tp=2)
    optimizers = [optimizer(m.parameters(), **settings) for m in (dense, model)]
    half = slice(0, 2) if rank < 2 else slice(2, 4)
    for step in range(5):
        batch = models.batch(seed=step)
        parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
        losses = [dense_loss(dense, part) for part in parts]
        torch.stack(losses).mean().backward()
        loss = module(**{name: value[half] for name, value in batch.items()}).loss
        loss.backward()
        close(loss, losses[rank // 2])
        # Were the counts of labels on the dp ranks equal, a mean over all tokens would pass as well.
        assert (loss - dense_loss(dense, batch)).abs() > 1e-6
        if step == 0:
            found = gradients(scheduled)
            assert set(found) == {name for name, _ in dense.named_parameters()}
            for name, parameter in dense.named_parameters():
                close(found[name], parameter.grad, name)
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        assert norm > 0.5
        close(clip_grad_norm_(scheduled, 0.5), norm)
        for each in optimizers:
            each.step()
            each.zero_grad()
    full, wanted = consolidate(scheduled), dense.state_dict()
    assert list(full) == list(wanted)
    for name, value in wanted.items():
        close(full[name], value, name)


def close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    limit = 1e-9 * float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")
