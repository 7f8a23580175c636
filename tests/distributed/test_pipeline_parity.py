"""DeepSpeed's PipelineEngine over a cut model trains as the untouched model in one process."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

import models
from partbook.dialects.deepspeed import consolidate, gradients, initialize
from ranks import on_ranks

# eps as in verify: with 1e-8, a gradient that is zero but for rounding (a key's bias) is divided by itself, and becomes
# +-lr. No two programs agree on those parameters to 1e-5; they do on all others.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}}
# Every step is clipped, so a wrong norm scales the whole update: with SGD it cannot hide behind Adam's division.
SGD = {"type": "SGD", "params": {"lr": 1.0}}
STEPS, ACCUMULATION = 5, 4


@dataclass(frozen=True)
class Case:
    family: str
    pp: int = 2
    tp: int = 1
    stage: int = 0
    built_with: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)
    # None: automatic
    cuts: str | None = None

    def __str__(self) -> str:
        given = [*self.built_with, *self.options, self.optimizer["type"], self.cuts or "auto"]
        return f"{self.family} pp {self.pp} tp {self.tp} zero {self.stage} {' '.join(given)}"

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 5000},
            "zero_allow_untested_optimizer": True,
            "optimizer": copy.deepcopy(self.optimizer),
            **more,
        }

    def build(self) -> nn.Module:
        return getattr(models, self.family)(**self.built_with)


FOUR = {"layers": 4}
T5_CUTS = "encoder.block.0,encoder,decoder.block.0"
ON_2 = [
    Case("gpt2", built_with=FOUR),
    Case("gpt2", stage=1, cuts="transformer.h.0.attn"),
    Case("llama", optimizer=ADAMW, options={"checkpoint_ratio": 0.5}, cuts="model.layers.0"),
    Case("llama", stage=1, built_with={"tied": True}),
    Case("bert"),
    Case("t5", stage=1),
]
ON_4 = [
    Case("gpt2", pp=4, built_with=FOUR),
    Case("llama", pp=4, stage=1, built_with=FOUR),
    Case("bert", pp=4, stage=1, built_with=FOUR),
    Case("gpt2", tp=2),
    Case("llama", tp=2, stage=1, options={"sequence_parallel": True}),
    Case("bert", tp=2, stage=1),
    Case("t5", tp=2),
    # three owners of the embedding; two tensors with gradients, and one that has none
    Case("t5", pp=4, cuts=T5_CUTS),
]

ON_8 = [
    Case("gpt2", tp=2, stage=1),
    Case("llama", tp=2, optimizer=ADAMW),
    Case("bert", tp=2),
    Case("t5", tp=2, stage=1),
]


def batches_of(case: Case, step: int) -> list[list[dict[str, Tensor]]]:
    """The parts of each dp rank, for every micro-batch of one step. Lengths differ within a step."""
    dp = dist.get_world_size() // (case.pp * case.tp)
    found = []
    for number in range(ACCUMULATION):
        whole = models.batch(size=2 * dp, length=12 + 2 * (number % 3), seed=step * ACCUMULATION + number, padded=True)
        found.append([{k: v[2 * i : 2 * i + 2] for k, v in whole.items()} for i in range(dp)])
    return found


def close(found: Tensor, wanted: Tensor, what: str, limit: float = 1e-5) -> None:
    found, wanted = found.detach().float(), wanted.detach().float()
    assert found.shape == wanted.shape, what
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    assert error <= limit, f"{what} differs by {error:.1e}"


def before_step(engine: Any, look: Any) -> None:
    """Have ``look`` called when the gradients of a step are complete, before the optimizer uses them."""
    step = engine._INSTRUCTION_MAP[instructions.OptimizerStep]

    def observed(engine: Any, **kwargs: Any) -> None:
        look()
        step(engine, **kwargs)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, instructions.OptimizerStep: observed}


def check_training(case: Case, limit: float = 1e-5) -> None:
    dense = case.build().train()
    optimizer = getattr(torch.optim, case.optimizer["type"])(dense.parameters(), **case.optimizer["params"])
    engine, *_ = initialize(
        model=copy.deepcopy(dense),
        schedule=case.family,
        schedule_args=case.options,
        tp=case.tp,
        pp=case.pp,
        cuts=case.cuts,
        config=case.config(),
    )
    assert type(engine) is PipelineEngine
    dp_rank = engine.scheduled.mesh.dp_rank
    found: list[dict[str, Tensor]] = []
    before_step(engine, lambda: found.append(gradients(engine)))
    for step in range(STEPS):
        batches = batches_of(case, step)
        losses = [dense(**part).loss for parts in batches for part in parts]
        wanted = sum(losses) / len(losses)
        wanted.backward()
        if step == 0:
            exact = {name: p.grad.clone() for name, p in dense.named_parameters() if p.grad is not None}
        loss = engine.train_batch(data_iter=iter([parts[dp_rank] for parts in batches]))
        close(loss, wanted, f"loss of step {step}", limit)
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        if case.stage:
            close(torch.tensor(float(engine.get_global_grad_norm())), norm, f"gradient norm of step {step}", limit)
        optimizer.step()
        optimizer.zero_grad()
    assert found[0].keys() == exact.keys()
    largest = max(float(grad.abs().max()) for grad in exact.values())
    for name, grad in found[0].items():
        error = float((grad - exact[name]).abs().max()) / max(float(exact[name].abs().max()), 1e-3 * largest)
        assert error <= limit, f"gradient of {name} differs by {error:.1e}"
    state = consolidate(engine)
    assert list(state) == list(dense.state_dict())
    for name, tensor in dense.state_dict().items():
        close(state[name], tensor, name, limit)


@pytest.mark.parametrize("case", ON_2, ids=str)
@on_ranks(2)
def test_training_equals_the_untouched_model(rank: int, case: Case) -> None:
    check_training(case)


@pytest.mark.parametrize("case", ON_4, ids=str)
@on_ranks(4)
def test_training_on_four_ranks(rank: int, case: Case) -> None:
    check_training(case)


@pytest.mark.parametrize("case", ON_8, ids=str)
@on_ranks(8)
def test_three_dimensions(rank: int, case: Case) -> None:
    check_training(case)
