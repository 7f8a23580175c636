"""megatron-core's own schedules, DDP and optimizers train a scheduled model as the untouched model trains."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_training as megatron
import models
from partbook.dialects.megatron import consolidate, gradients
from ranks import on_ranks

# Every step is clipped, so a wrong norm scales the whole update: with SGD it cannot hide behind Adam's division.
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0}
# eps: with 1e-8, a gradient that is zero but for rounding (a key's bias) is divided by itself.
ADAM = {"optimizer": "adam", "lr": 1e-3, "adam_eps": 1e-5, "weight_decay": 0.1}
STEPS = 5


@dataclass(frozen=True)
class Case:
    family: str
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    distributed: bool = False
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)
    options: dict[str, Any] = field(default_factory=dict)
    built_with: dict[str, Any] = field(default_factory=dict)
    cuts: str | None = None
    padded: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [*self.options, *self.built_with, self.cuts or "", "padded" if self.padded else "", *self.ddp]
        kind = "distributed optimizer" if self.distributed else self.optimizer["optimizer"]
        return f"{self.family} tp {self.tp} pp {self.pp} vp {self.vp} {kind} {' '.join(given)}".strip()

    def build(self) -> nn.Module:
        return getattr(models, self.family)(**{"layers": 4 if self.vp else 2, **self.built_with})

    def torch_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer["optimizer"] == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.optimizer["lr"])
        # Megatron's parameter groups do without decay on biases and norms only where the trainer asks for it.
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)


SEQUENCE = {"sequence_parallel": True}
# A bucket for each parameter: what nobody waits for is stale.
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}
ON_2 = [
    case
    for family in ("gpt2", "llama")
    for case in (
        Case(family, tp=2),
        Case(family, tp=2, options=SEQUENCE),
        Case(family, pp=2),
        Case(family, pp=2, vp=2),
    )
] + [
    Case("gpt2", tp=2, built_with={"tied": False}, options={"fuse_qkv": True, "checkpoint_ratio": 1.0}),
    Case("gpt2", tp=2, options={"fuse_activation": True, "efficient_attention": True, "checkpoint_attention": True}),
    Case("gpt2", pp=2, optimizer=ADAM, padded=True),
    Case("llama", tp=2, options={"fuse_qkv": True, "fuse_gate_up": True, "fuse_norm": True}),
    Case("llama", tp=2, built_with={"kv_heads": 1, "tied": True}),
    Case("llama", pp=2, built_with={"tied": True}, options={"checkpoint_ratio": 0.5}, cuts="model.layers.0"),
    Case("t5", tp=2, padded=True),
    Case("t5", pp=2, padded=True),
    Case("gpt2", distributed=True, optimizer=ADAM, options={"fuse_activation": True}, ddp=OVERLAPS),
    Case("llama", distributed=True, optimizer=ADAM, options={"fuse_activation": True, "fuse_norm": True}, ddp=OVERLAPS),
    # Four tensors cross, one of which takes no gradient.
    Case("t5", pp=2, padded=True, cuts="decoder.block.0"),
    Case("bert", pp=2, padded=True),
]
ON_4 = [
    case
    for family in ("gpt2", "llama")
    for case in (Case(family, tp=2, pp=2), Case(family, tp=2, distributed=True, optimizer=ADAM))
] + [
    Case("llama", tp=2, pp=2, vp=2, options=SEQUENCE),
    Case("gpt2", pp=2, distributed=True, optimizer=ADAM, ddp=OVERLAPS),
    Case("t5", tp=2, pp=2, padded=True, cuts="decoder.block.0"),
]


def close(found: Tensor, wanted: Tensor, what: str, limit: float = 1e-5) -> None:
    found, wanted = found.detach().float(), wanted.detach().float()
    assert found.shape == wanted.shape, what
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    assert error <= limit, f"{what} differs by {error:.1e}"


def check_training(case: Case) -> None:
    megatron.start(case.tp, case.pp, case.vp)
    dense = case.build().train()
    optimizer = case.torch_optimizer(dense)
    training = megatron.train(
        case.family, copy.deepcopy(dense), vp=case.vp, options=case.options, cuts=case.cuts,
        distributed=case.distributed, optimizer=case.optimizer, **case.ddp,
    )  # fmt: skip
    mesh = training.scheduled.mesh
    assert (mesh.tp, mesh.pp, mesh.dp) == (case.tp, case.pp, dist.get_world_size() // (case.tp * case.pp))
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        parts = megatron.batches_of(step, dp=mesh.dp, padded=case.padded)
        losses = [dense(**part).loss for batch in parts for part in batch]
        wanted = sum(losses) / len(losses)
        wanted.backward()
        mine = [batch[mesh.dp_rank] for batch in parts]
        loss, norm = training.step(mine, None if step else lambda: found.update(gradients(training.chunks)))
        close(loss, wanted, f"loss of step {step}")
        if step == 0:
            check_gradients(found, dense)
        exact_norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        close(torch.tensor(norm), exact_norm, f"gradient norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
    state = consolidate(training.chunks)
    assert state.keys() == dense.state_dict().keys()
    for name, value in dense.state_dict().items():
        close(state[name], value, name)


def check_gradients(found: dict[str, Tensor], dense: nn.Module) -> None:
    exact = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    assert found.keys() == exact.keys()
    largest = max(float(grad.abs().max()) for grad in exact.values())
    for name, grad in found.items():
        error = float((grad - exact[name]).abs().max()) / max(float(exact[name].abs().max()), 1e-3 * largest)
        assert error <= 1e-5, f"gradient of {name} differs by {error:.1e}"


@pytest.mark.parametrize("case", ON_2, ids=str)
@on_ranks(2)
def test_two_ranks_train_as_one(rank: int, case: Case) -> None:
    check_training(case)


@pytest.mark.parametrize("case", ON_4, ids=str)
@on_ranks(4)
def test_four_ranks_train_as_one(rank: int, case: Case) -> None:
    check_training(case)
