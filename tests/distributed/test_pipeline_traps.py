"""What goes wrong in pipelines elsewhere: integers between stages, iterators that end, 16-bit ties, other shapes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineError
from torch import Tensor, nn

import models
from deepspeed_pipelines import assert_weights, batches, config, dense_steps, nothing, start
from partbook.core import AgreementError, ScheduleError
from partbook.dialects.deepspeed import ConfigError, consolidate, initialize
from partbook.dialects.deepspeed.pipeline import EndOfData
from ranks import on_ranks


class Traffic:
    """What this rank sends: shape and dtype of each message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[tuple[int, ...], torch.dtype]] = []
        for name in ("isend", "send"):
            monkeypatch.setattr(dist, name, self._recorder(getattr(dist, name)))

    def _recorder(self, untouched: Any) -> Any:
        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sent.append((tuple(tensor.shape), tensor.dtype))
            return untouched(tensor, *args, **kwargs)

        return send


@on_ranks(3)
def test_integers_between_three_stages(rank: int) -> None:
    """DeepSpeed's buffers forget dtypes between three stages. Masks travel where a rank has no iterator, as integers
    beside the hidden state; nothing else does, no metadata either."""
    model = models.gpt2(layers=3)
    cuts = "transformer.h.0,transformer.h.1"
    engine, twin = start(model, 3, cuts=cuts), copy.deepcopy(model)
    steps = [batches(2, 2 * step) for step in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        traffic = Traffic(patch)
        losses = [
            # everyone has an iterator; the middle has none; only the first has one
            engine.train_batch(data_iter=iter(step) if rank in having else None).item()
            for step, having in zip(steps, ((0, 1, 2), (0, 2), (0,)), strict=True)
        ]
    torch.testing.assert_close(losses, dense_steps(twin, steps), rtol=1e-5, atol=0)
    assert_weights(engine, twin)
    integers = [(shape, dtype) for shape, dtype in traffic.sent if dtype != torch.float32]
    floats = [shape for shape, dtype in traffic.sent if dtype == torch.float32]
    lengths = [[batch["input_ids"].shape[1] for batch in step] for step in steps]
    hidden = [(2, length, 32) for step in lengths for length in step]
    # activations down, gradients up
    assert sorted(floats) == sorted(hidden * {0: 1, 1: 2, 2: 1}[rank])
    masks = [(2, length) for step in lengths[1:] for length in step]
    labels = [(2, length) for length in lengths[2]]
    # the mask of the second step ends at the middle stage, where labels only pass
    carried = {0: masks + labels, 1: [(2, length) for length in lengths[2]] + labels, 2: []}[rank]
    assert sorted(shape for shape, _ in integers) == sorted(carried)
    assert all(dtype == torch.int64 for _, dtype in integers)


class EarlyValues(nn.Module):
    """A float whose reader gives it no gradient, and one that has none: both cross to the last of three stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = self.a(x)
        fixed = first.detach().sigmoid()
        second = self.b(first)
        third = self.c(second.relu())
        return ((third - target - fixed) ** 2).mean() + (first.argmax(-1) * 0).sum()


@on_ranks(3)
def test_floats_without_gradients(rank: int) -> None:
    data = [{"x": torch.randn(2, 4), "target": torch.randn(2, 4)} for _ in range(4)]
    model = EarlyValues()

    def schedule(sch: Any) -> None:
        sch["a"].cut_pipeline_stage(inputs=data[0])
        sch["b"].cut_pipeline_stage()

    engine, twin = start(model, 3, schedule=schedule), copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for step in (data[:2], data[2:]):
        loss = torch.stack([twin(**batch) for batch in step]).mean()
        torch.testing.assert_close(engine.train_batch(data_iter=iter(step)), loss.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(engine, twin)


@on_ranks(4)
def test_two_gradients_at_tp_2(rank: int) -> None:
    """By default DeepSpeed splits the first tensor that crosses over tp, and takes only one that has a gradient."""
    model = models.gpt2(layers=2)
    engine = start(model, 2, tp=2, schedule="gpt2", cuts="transformer.h.0.attn")
    steps = [batches(2, 2 * step) for step in range(2)]
    losses = [engine.train_batch(data_iter=iter(step)).item() for step in steps]
    torch.testing.assert_close(losses, dense_steps(model, steps), rtol=1e-5, atol=0)
    assert_weights(engine, model)


class Counted:
    """An iterator that tells how many items it gave."""

    def __init__(self, items: list[Any]) -> None:
        self.left, self.given = items, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.given += 1
        return self.left.pop(0)


@on_ranks(2)
def test_iterators_that_end_or_differ(rank: int) -> None:
    """On every rank at once, nothing is trained, and training goes on with another iterator."""
    model = models.gpt2(layers=2)
    engine = start(model, 2)
    before = consolidate(engine)
    with pytest.raises(StopIteration, match="ended after 1 of the 2 micro-batches"):
        # this rank's own iterator may have more
        engine.train_batch(data_iter=Counted(batches(1 if rank else 4)))
    with pytest.raises(EndOfData):
        engine.train_batch(data_iter=iter([]))
    with pytest.raises(AgreementError, match="input_ids of micro-batch 1 differs between ranks 0 and 1"):
        engine.train_batch(data_iter=iter(batches(2) if rank else [*batches(1), *batches(1)]))
    with pytest.raises(ValueError, match="need a data_iter"):
        engine.train_batch(data_iter=None)
    bad = {**batches(1)[0], "special_tokens_mask": torch.zeros(2, 10)}
    with pytest.raises(ValueError, match="'special_tokens_mask', which GPT2LMHeadModel does not take"):
        engine.train_batch(data_iter=iter([bad, bad]))
    with pytest.raises(ValueError, match="'labels' in a batch is a list"):
        engine.train_batch(data_iter=iter([{**batches(1)[0], "labels": ["a"]}] * 2))
    with pytest.raises(ValueError, match="a batch is a str"):
        engine.train_batch(data_iter=iter(["ab", "cd"]))
    for name, call in (("engine(...)", engine), ("engine.backward()", engine.backward), ("engine.step()", engine.step)):
        with pytest.raises(PipelineError, match="cannot run a model that is cut into pipeline stages") as refused:
            call()
        assert name in str(refused.value)
        assert "train_batch" in str(refused.value)
    for key, tensor in consolidate(engine).items():
        assert torch.equal(tensor, before[key])
    data = Counted(batches(5))
    losses = [engine.train_batch(data_iter=data).item() for _ in range(2)]
    assert data.given == 4
    torch.testing.assert_close(losses, dense_steps(model, [batches(2), batches(2, 2)]), rtol=1e-5, atol=0)


@on_ranks(2)
def test_contents_that_differ_are_found_in_the_first_batch(rank: int) -> None:
    engine = start(models.gpt2(layers=2), 2)
    with pytest.raises(AgreementError, match=r"input_ids.* of micro-batch 0 differs"):
        engine.train_batch(data_iter=iter(batches(2, length=10) if rank else batches(2, first=7, length=10)))


@on_ranks(2)
def test_evaluation_between_steps(rank: int) -> None:
    """Batches of other sizes, any number of them; logits of the last; no loss asked for, twice; training goes on."""
    model = models.gpt2(layers=2, dropout=0.0)
    engine = start(model, 2)
    first, second = batches(2), batches(2, 2)
    assert engine.train_batch(data_iter=iter(first)).item() > 0
    dense_steps(model, [first])
    model.eval()
    held_out = batches(3, 5, size=3)
    with torch.no_grad():
        outputs = [model(**batch) for batch in held_out]
    wanted = torch.stack([output.loss for output in outputs]).mean()
    loss, logits = engine.eval_batch(iter(held_out), return_logits=True, num_micro_batches=3)
    torch.testing.assert_close(loss.item(), wanted.item(), rtol=1e-5, atol=0)
    if rank == 1:
        torch.testing.assert_close(logits, outputs[-1].logits, rtol=1e-4, atol=1e-5)
    for _ in range(2):
        unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in held_out[:2]]
        found = engine.eval_batch(iter(unlabelled), compute_loss=False, reduce_output=None)
        if rank == 1:
            torch.testing.assert_close(found[0], outputs[0].logits, rtol=1e-4, atol=1e-5)
    loss = engine.train_batch(data_iter=iter(second))
    assert engine.module.training
    torch.testing.assert_close(loss.item(), dense_steps(model, [second])[0], rtol=1e-5, atol=0)


SIXTEEN = [
    ({"bf16": {"enabled": True}}, 0),
    ({"bf16": {"enabled": True}}, 1),
    ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 1),
    ({"fp16": {"enabled": True, "initial_scale_power": 8}, "data_types": {"grad_accum_dtype": "fp32"}}, 1),
]


@pytest.mark.parametrize(("more", "stage"), SIXTEEN, ids=["bf16", "bf16 zero 1", "fp16", "fp16 accumulated in fp32"])
@on_ranks(2)
def test_tied_weights_in_16_bits(rank: int, more: dict[str, Any], stage: int) -> None:
    """Copies are equal after every step. Ranks are seeded differently: all start with rank 0's weights."""
    if "fp16" in more and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this device")
    reference = models.gpt2(layers=2)
    model = models.gpt2(layers=2, seed=rank)
    engine = start(model, 2, config=config(2, stage, **more), cuts="transformer.h.0")
    steps = [batches(2, 2 * step) for step in range(4)]
    name = "lm_head.weight" if rank else "transformer.wte.weight"
    found = []
    for step in steps:
        found.append(engine.train_batch(data_iter=iter(step)).item())
        copies = [torch.empty_like(engine.scheduled.model.get_parameter(name)) for _ in range(2)]
        dist.all_gather(copies, engine.scheduled.model.get_parameter(name).detach())
        assert torch.equal(*copies)
    torch.testing.assert_close(found, dense_steps(reference, steps), rtol=0, atol=2e-2)


@on_ranks(2)
def test_loss_of_the_user(rank: int) -> None:
    """Pairs of inputs and labels, as DeepSpeed's own pipelines have them; a dataset; a batch function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    data = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(4)]

    def schedule(sch: Any) -> None:
        sch["0"].cut_pipeline_stage(inputs={"input": data[0][0]})

    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.5}])
    twin = copy.deepcopy(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plain = config()
    del plain["optimizer"]
    engine, *_ = initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, schedule=schedule, pp=2, config=plain,
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    other = torch.optim.SGD(twin.parameters(), lr=0.5)
    for step in (data[:2], data[2:]):
        loss = torch.stack([nn.functional.cross_entropy(twin(x), y) for x, y in step]).mean()
        torch.testing.assert_close(engine.train_batch(data_iter=iter(step)), loss.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        other.step()
        other.zero_grad()
        other.param_groups[0]["lr"] *= 0.5
    assert_weights(engine, twin)
    engine.set_batch_fn(lambda item: (item["features"], item["class"]))
    found = engine.eval_batch(iter([{"features": x, "class": y} for x, y in data[:2]]))
    with torch.no_grad():
        wanted = torch.stack([nn.functional.cross_entropy(twin(x), y) for x, y in data[:2]]).mean()
    torch.testing.assert_close(found.item(), wanted.item())


REFUSED = [
    (
        {"config": {"zero_optimization": {"stage": 2}}},
        ConfigError,
        "ZeRO stage 2 cannot be combined with pipeline stages",
    ),
    (
        {"config": {"zero_optimization": {"stage": 3}}},
        ConfigError,
        "ZeRO stage 3 cannot be combined with pipeline stages",
    ),
    ({"config": {"fp16": {"enabled": True}}}, ConfigError, "fp16 with ZeRO stage 0 trains wrongly"),
    ({"config": {"torch_autocast": {"enabled": True}}}, ConfigError, "torch_autocast cannot be combined"),
    ({"config": {"pipeline": {"activation_checkpoint_interval": 1}}}, ConfigError, "a stage is one layer here"),
    ({"config": {"pipeline": {"pipe_partitioned": True}}}, ConfigError, "pipe_partitioned is not supported"),
    ({"version": "0.19.2"}, ConfigError, "DeepSpeed 0.19.2 scales the gradients of pipeline stages wrongly"),
    ({"pp": 4}, ValueError, r"tp=1 \* pp=4 does not divide the world size 2"),
    ({"cuts": "transformer.h.0,transformer.h.1"}, ScheduleError, "2 cuts make 3 stages, which do not fit on pp=2"),
    ({"cuts": "transformer.h.7"}, ScheduleError, "there is no module 'transformer.h.7'"),
    (
        {"cuts": "transformer.h.0", "pp": 1},
        ScheduleError,
        "there are cuts for 2 stages, more than the one rank of pp=1",
    ),
    ({"cuts": "transformer.h.0.attn.attn_dropout"}, ScheduleError, "is not called with these inputs"),
]


@on_ranks(2)
def test_what_cannot_work_is_refused_before_anything_is_built(rank: int) -> None:
    import deepspeed

    model = models.gpt2(layers=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        made: list[Any] = []
        untouched = dist.new_group
        for given, error, message in REFUSED:
            options = {"pp": 2, "schedule": nothing, **given}
            options["config"] = {**config(), **given.get("config", {})}
            patch.setattr(deepspeed, "__version__", options.pop("version", "0.19.8"))
            patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(args) or untouched(*args, **kwargs))
            with pytest.raises(error, match=message):
                initialize(model=model, **options)
        assert made == []
    assert not hasattr(model, "_partbook_steps")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@on_ranks(2)
def test_recomputation_draws_the_same_dropout(rank: int) -> None:
    """With dropout on, blocks that are recomputed train as blocks that are not."""
    losses = []
    for ratio in (0.0, 1.0):
        torch.manual_seed(5)
        model = models.gpt2(layers=2, dropout=0.2)
        engine = start(model, 2, schedule="gpt2", schedule_args={"checkpoint_ratio": ratio})
        losses.append([engine.train_batch(data_iter=iter(batches(2, 2 * step))).item() for step in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(4)
def test_a_checkpoint_of_the_same_size_continues_exactly(rank: int, stage: int, tmp_path: Any) -> None:
    model = models.gpt2(layers=2)
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    options: dict[str, Any] = {"tp": 2, "schedule": "gpt2", "config": config(2, stage, optimizer=adam)}
    engine = start(model, 2, **options)
    engine.train_batch(data_iter=iter(batches(2)))
    engine.save_checkpoint(str(tmp_path), tag="first", client_state={"seen": 7})
    more = [engine.train_batch(data_iter=iter(batches(2, 2 + step))).item() for step in range(2)]
    again = start(models.gpt2(layers=2, seed=1), 2, **options)
    _, client = again.load_checkpoint(str(tmp_path), tag="first")
    assert client["seen"] == 7
    assert [again.train_batch(data_iter=iter(batches(2, 2 + step))).item() for step in range(2)] == more
    for (name, one), (_, other) in zip(consolidate(engine).items(), consolidate(again).items(), strict=True):
        assert torch.equal(one, other), name
