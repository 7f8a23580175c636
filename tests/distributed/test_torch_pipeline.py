"""Stages under torch's pipeline schedules train as the untouched model in one process."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from partbook.core import AgreementError, Mesh, PartbookError, consolidate, gradients, materialize
from partbook.dialects.pytorch import PipelineModel, clip_grad_norm_, initialize
from ranks import on_ranks

# eps: with 1e-8, the update of a gradient that is zero but for rounding is rounding noise divided by itself.
ADAMW = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}
STEPS, MICRO_BATCHES, MAX_NORM = 5, 4, 0.1


@dataclass(frozen=True)
class Case:
    """``cuts``: None for automatic ones."""

    family: str
    orders: tuple[str, ...]
    cuts: str | None
    pp: int = 2
    tp: int = 1
    built_with: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.family, *self.orders, f"pp {self.pp} tp {self.tp}", *self.built_with, *self.options])

    @property
    def dp(self) -> int:
        return dist.get_world_size() // (self.pp * self.tp)

    def build(self) -> nn.Module:
        return getattr(models, self.family)(**self.built_with).double()

    def start(self, model: nn.Module) -> tuple[PipelineModel, Any]:
        arguments = {"tp": self.tp, "pp": self.pp, "cuts": self.cuts, "pipeline_schedule": self.orders[0]}
        return initialize(model, self.family, self.options, micro_batches=MICRO_BATCHES, **arguments)


FOUR = {"layers": 4}
CUTS_OF_FOUR = "transformer.h.0,transformer.h.1,transformer.h.2"
RECOMPUTED = {"checkpoint_ratio": 1.0}
ON_2 = [
    Case("gpt2", ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), None, built_with=FOUR),
    Case("gpt2", ("ZBVZeroBubble", "DualPipeV"), CUTS_OF_FOUR, built_with=FOUR),
    Case("llama", ("1F1B", "InterleavedZeroBubble"), "model.layers.0", options=RECOMPUTED),
    Case("t5", ("InterleavedZeroBubble", "Interleaved1F1B"), "encoder.block.0,encoder.block.1,decoder.block.0"),
    Case("bert", ("1F1B", "InterleavedZeroBubble"), "bert.encoder.layer.0"),
]
ON_4 = [
    Case("gpt2", ("1F1B",), "transformer.h.0", tp=2),
    Case("llama", ("GPipe", "InterleavedZeroBubble"), "model.layers.0", tp=2, options={"sequence_parallel": True}),
    Case("t5", ("InterleavedZeroBubble",), "encoder.block.0,encoder.block.1,decoder.block.0", tp=2, options=RECOMPUTED),
    # dp 2
    Case("gpt2", ("GPipe", "1F1B"), "transformer.h.0.attn"),
]


def parts_of(case: Case, step: int) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of each dp rank in one step, of different lengths."""
    make = models.pair if case.family == "t5" else models.batch
    return [
        [
            make(size=2, length=12 + 2 * (i % 3), seed=(step * MICRO_BATCHES + i) * case.dp + rank, padded=True)
            for i in range(MICRO_BATCHES)
        ]
        for rank in range(case.dp)
    ]


def close(found: Tensor, wanted: Tensor, what: str, floor: float = 1e-30, limit: float = 1e-6) -> None:
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, what
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(floor))
    assert error <= limit, f"{what} differs by {error:.1e}"


def close_gradients(found: dict[str, Tensor], exact: dict[str, Tensor], what: str, limit: float = 1e-6) -> None:
    assert found.keys() == exact.keys(), what
    # What is zero but for rounding, as the gradient of a key's bias, is not measured by itself.
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in exact.values())
    for name, gradient in found.items():
        close(gradient, exact[name], f"{what} of {name}", floor, limit)


def learn(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Backward of the mean loss of micro-batches of one sample."""
    size = len(batch["input_ids"])
    for i in range(size):
        (model(**{name: value[i : i + 1] for name, value in batch.items()}).loss / size).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass
class Training:
    """What happens to the untouched model."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    norms: list[Tensor]
    state: dict[str, Tensor]

    @staticmethod
    def of(case: Case) -> "Training":
        model, found = case.build().train(), Training([], {}, [], {})
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        for step in range(STEPS):
            losses = [model(**one).loss for own in parts_of(case, step) for one in own]
            found.losses.append(sum(losses) / len(losses))
            found.losses[-1].backward()
            found.gradients = found.gradients or gradients_of(model)
            found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
        assert min(found.norms) > MAX_NORM
        found.state = model.state_dict()
        return found


def check_training(case: Case) -> None:
    exact, model = Training.of(case), case.build()
    initial = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        # The first rank's weights count, as they do for DistributedDataParallel.
        next(model.parameters()).add_(dist.get_rank())
    pipeline, scheduled = case.start(model)
    for order in case.orders:
        if order != pipeline.order:
            # of the same stages
            materialize(scheduled, initial)
            pipeline = PipelineModel(scheduled, order, MICRO_BATCHES)
        optimizer = torch.optim.AdamW(pipeline.parameters(), **ADAMW)
        for step in range(STEPS):
            loss = pipeline.step(parts_of(case, step)[scheduled.mesh.dp_rank])
            close(loss, exact.losses[step], f"{order}: loss of step {step}")
            if step == 0:
                close_gradients(gradients(scheduled), exact.gradients, f"{order}: gradient")
            close(clip_grad_norm_(scheduled, MAX_NORM), exact.norms[step], f"{order}: norm of step {step}")
            optimizer.step()
            optimizer.zero_grad()
        state = consolidate(scheduled)
        assert list(state) == list(exact.state)
        for name, tensor in exact.state.items():
            close(state[name], tensor, f"{order}: {name}")


@pytest.mark.parametrize("case", ON_2, ids=str)
@on_ranks(2)
def test_training_equals_the_untouched_model(rank: int, case: Case) -> None:
    check_training(case)


@pytest.mark.parametrize("case", ON_4, ids=str)
@on_ranks(4)
def test_training_on_four_ranks(rank: int, case: Case) -> None:
    check_training(case)


class Stack(nn.Module):
    """x (B, 8) -> (B, 8), without a loss of its own; the first and the last of four blocks share their weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.blocks[3][0].weight = self.blocks[0][0].weight

    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x**power


def cut_stack(sch: Any, options: dict[str, Any]) -> None:
    for i in options["after"]:
        sch[f"blocks.{i}"].cut_pipeline_stage(inputs={"x": torch.zeros(2, 8)})


LOSS = nn.functional.mse_loss


def start_stack(model: nn.Module, *after: int, **given: Any) -> tuple[PipelineModel, Any]:
    arguments = {"pp": 2, "micro_batches": 2, "loss_fn": LOSS, **given}
    return initialize(model, cut_stack, {"after": after}, **arguments)


def stack_batch(seed: int, size: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.rand(size, 8, generator=random) for name in ("x", "labels")}


def check_stack(dense: nn.Module, pipeline: PipelineModel, scheduled: Any, what: str = "") -> None:
    """Steps of several sizes, whose gradients add up."""
    for step, (size, power) in enumerate([(4, 1.0), (8, 1.0), (2, 2.0)]):
        batch = stack_batch(step, size)
        wanted = LOSS(dense(batch["x"], power), batch["labels"])
        wanted.backward()
        close(pipeline.step({**batch, "power": power}), wanted, f"{what}loss of {size} samples")
        close_gradients(gradients(scheduled), gradients_of(dense), f"{what}gradient after {step + 1} steps")


@on_ranks(2)
def test_a_plain_model_learns_from_batches_of_any_size(rank: int) -> None:
    pipeline, scheduled = start_stack(Stack(), 1)
    own = [f"blocks.{i}.0.{name}" for i in ((0, 1), (2, 3))[rank] for name in ("weight", "bias")]
    assert [name for name, _ in pipeline.named_parameters()] == own
    check_stack(Stack(), pipeline, scheduled)
    wrong: Any
    for wrong, message in (
        (stack_batch(0, 5), r"micro_batches=2 does not divide the batch, which has 5 samples\n.*drop_last=True"),
        (
            {**stack_batch(0, 4), "labels": torch.ones(2, 8)},
            r"dim 0 of 'labels' is 2 and of 'x' 4, so (.|\n)* a list of",
        ),
        ([stack_batch(0, 2)] * 3, "the batch has 3 micro-batches, not micro_batches=2"),
        (torch.ones(4, 8), "a batch is a Tensor, not a dict of the model's arguments or a list of such dicts"),
        ({**stack_batch(0, 4), "y": torch.ones(4)}, "the batch has 'y', which Stack does not take"),
        ({**stack_batch(0, 4), "x": [1.0] * 4}, "'x' in a batch is a list, not a tensor or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.step(wrong)
    # without a loss function there would be none, which every rank says
    with pytest.raises(ValueError, match=r"the model gives no loss for this batch\n.*loss_fn="):
        PipelineModel(scheduled, "GPipe", 2).step({"x": torch.ones(4, 8)})


@on_ranks(4)
def test_tied_weights_of_two_of_four_stages(rank: int) -> None:
    pipeline, scheduled = start_stack(Stack(), 0, 1, 2, pp=4, micro_batches=2, pipeline_schedule="GPipe")
    assert [tie.ranks for tie in scheduled.ties_across] == [[0, 3]]
    check_stack(Stack(), pipeline, scheduled)


@on_ranks(4)
def test_parameters_that_are_unfrozen_later_are_reduced(rank: int) -> None:
    """Over dp, and over the stages that share them."""
    dense = Stack()
    dense.blocks[0][0].weight.requires_grad_(False)
    dense.blocks[2].requires_grad_(False)
    pipeline, scheduled = start_stack(copy.deepcopy(dense), 1)
    own = stack_batch(scheduled.mesh.dp_rank, 4)
    pipeline.step(own)
    for module in (dense, pipeline.module):
        module.requires_grad_(True).zero_grad()
    pipeline.step(own)
    for batch in (stack_batch(0, 4), stack_batch(1, 4)):
        (LOSS(dense(batch["x"]), batch["labels"]) / 2).backward()
    close_gradients(gradients(scheduled), gradients_of(dense), "gradient")


# what is frozen -> blocks, the schedule
FROZEN = {
    "the first stage": ((0, 1), "1F1B"),
    "the last stage": ((0, 2, 3), "InterleavedZeroBubble"),
    "all but the last block": ((1, 2), "InterleavedZeroBubble"),
    "every weight of the first stage and some of the last": ((0, 1, 2), "InterleavedZeroBubble"),
}


@on_ranks(2)
def test_stages_without_gradients(rank: int) -> None:
    """What crosses takes none, or a stage's parameters do not."""
    for what, (blocks, order) in FROZEN.items():
        dense = Stack()
        for i in blocks:
            dense.blocks[i].requires_grad_(False)
        pipeline, scheduled = start_stack(copy.deepcopy(dense), 1, pipeline_schedule=order)
        check_stack(dense, pipeline, scheduled, f"{what}: ")


@on_ranks(2)
def test_evaluation_between_steps(rank: int) -> None:
    """Losses, outputs, no gradients: torch's own evaluation divides those that are there by the micro-batches."""
    dense = models.gpt2()
    cuts = "transformer.h.0.attn,transformer.h.0,transformer.h.1.attn"
    given = {"pp": 2, "micro_batches": 2, "pipeline_schedule": "ZBVZeroBubble", "cuts": cuts}
    pipeline, scheduled = initialize(models.on_meta(models.gpt2), "gpt2", weights=dense, **given)
    train = [models.batch(size=2, seed=seed) for seed in range(2)]
    odd = [models.batch(size=size, length=8 + size, seed=size) for size in (3, 1, 2)]
    for batch in train:
        learn(dense.train(), batch)
        pipeline.step(batch)
        # Tied weights are on one rank here, that of the first and the last stage of a V.
        close_gradients(gradients(scheduled), gradients_of(dense), "gradient", 1e-5)
        with torch.no_grad():
            wanted = [dense.eval()(**one) for one in odd]
        close(pipeline.eval(odd), sum(one.loss for one in wanted) / 3, "loss of an evaluation", limit=1e-5)
        outputs = pipeline.outputs([{"input_ids": one["input_ids"]} for one in odd])
        assert (outputs is None) == (rank == 1)
        for one, other in zip(outputs or [], wanted, strict=rank == 0):
            close(one.logits, other.logits, "logits", limit=1e-5)
        with pytest.raises(ValueError, match="the model gives no loss for this batch"):
            pipeline.eval([{"input_ids": odd[0]["input_ids"]}])
    assert pipeline.module.training


# what is wrong -> after which blocks to cut, arguments, message
REFUSED: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "an unknown schedule": (
        (1,), {"pipeline_schedule": "1B1F"}, r"no pipeline_schedule '1B1F'; did you mean '1F1B'\?"),
    "no micro-batches": ((1,), {"micro_batches": None}, "micro_batches=None: pass into how many"),
    "stages that no rank has": ((0, 1), {}, "2 cuts make 3 stages, which do not fit on pp=2 ranks"),
    "several stages for a schedule of one": (
        (0, 1, 2), {},
        r"pipeline_schedule='1F1B' runs 2 stages on pp=2 ranks, and there are 4\n.*1 cuts; Interleaved1F1B, LoopedBFS"),
    "fewer micro-batches than stages": (
        (1,), {"micro_batches": 1}, r"pipeline_schedule='1F1B' cannot run micro_batches=1: Number of microbatches"),
    "other cuts than asked for": (
        (1,), {"stages_per_rank": 2}, "stages_per_rank=2 on pp=2 are 4 stages, and the cuts make 2"),
    "a pipeline of one rank": (
        (), {"pp": 1}, "micro_batches= is for a model that is cut into pipeline stages, and pp is 1"),
    "ranks that are not there": (
        (1,), {"pp": 4}, r"tp=1 \* pp=4 does not divide the world size 2; pp could be one of \[1, 2\]"),
    "a mesh without groups": ((1,), {"mesh": Mesh(pp=2)}, r"has no process groups: make_mesh\(tp, pp\) gives"),
}  # fmt: skip


@on_ranks(2)
def test_what_cannot_run_is_refused_before_the_model_is_touched(rank: int) -> None:
    model = Stack()
    parameters, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    for what, (after, given, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            start_stack(model, *after, **given)
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True)), what
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), what
    # the same model, with what works
    pipeline, _ = start_stack(model, 1)
    batch = stack_batch(0, 4)
    with pytest.raises(PartbookError, match=r"cut into pipeline stages cannot be called(.|\n)*pipeline.step\(batch\)"):
        pipeline(**batch)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"step\(\) needs gradients enabled; eval\(\) runs without"):
        pipeline.step(batch)
    with pytest.raises(AgreementError, match=r"the ranks of one pipeline must see the same .*labels.* ranks 0 and 1: "):
        pipeline.step({**batch, "labels": batch["labels"] + rank})
    assert pipeline.step(batch).isfinite()
