"""All stages of a model in one process as a runtime runs them: tensors are cut off at the boundaries, gradients handed
back over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partbook.core import Mesh, Schedule, ScheduledModel, build, create_schedule

# the input of the plain models
X = {"x": torch.linspace(-1, 1, 12).view(3, 4)}


def cut(model: nn.Module, *paths: str, inputs: Mapping[str, Any] | None = None) -> ScheduledModel:
    """``model`` cut after ``paths``, every stage in this process."""
    return build(cut_schedule(model, *paths, inputs=inputs))


def cut_schedule(
    model: nn.Module, *paths: str, inputs: Mapping[str, Any] | None = None, mesh: Mesh | None = None
) -> Schedule:
    sch = create_schedule(model, mesh or Mesh())
    for path in paths:
        sch[path].cut_pipeline_stage(inputs=inputs)
    return sch


def crossing(scheduled: ScheduledModel) -> list[list[tuple[str, tuple[Any, ...], torch.dtype, bool]]]:
    """For each boundary, (name, shape with symbols as their names, dtype, whether it has a gradient)."""
    assert scheduled.pipeline is not None
    wiring = scheduled.pipeline.wirings[0]
    return [
        [
            (v.name, tuple(s if isinstance(s, int) else str(s) for s in v.shape), v.dtype, v.requires_grad)
            for v in p.sent
        ]
        for p in wiring.parts[:-1]
    ]


def run(scheduled: ScheduledModel, batch: Mapping[str, Any], *, backward: bool = True) -> Any:
    """The output of the last stage; with ``backward`` the gradients of its ``loss_of`` are on the parameters."""
    pipeline = scheduled.pipeline
    assert pipeline is not None
    training = scheduled.model.training
    wiring = pipeline.wiring(batch, training)
    values = wiring.values(pipeline.skeleton, batch)
    instance = wiring.at(values)
    received: list[Tensor] = []
    boundaries: list[tuple[Sequence[Tensor], list[Tensor]]] = []
    for stage, part in zip(scheduled.stages, wiring.parts, strict=True):
        assert stage.module is not None
        result = instance.run(stage.index, stage.module, received, values, torch.device("cpu"))
        if part is wiring.parts[-1]:
            break
        assert [tuple(t.shape) for t in result] == [instance.shape(value) for value in part.sent]
        assert [t.dtype for t in result] == [value.dtype for value in part.sent]
        if torch.is_grad_enabled():
            assert [t.requires_grad for t in result] == [value.requires_grad for value in part.sent]
        received = [t.detach().clone().requires_grad_(t.requires_grad) for t in result]
        boundaries.append((result, received))
    if backward:
        loss_of(result).backward()
        for sent, got in reversed(boundaries):
            pairs = [(t, r.grad) for t, r in zip(sent, got, strict=True) if r.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
    return result


def loss_of(output: Any) -> Tensor:
    """The output's own loss, else a scalar that depends on every element of every tensor."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t)).sum() for t in tensors)  # type: ignore[return-value]


def assert_same(scheduled: ScheduledModel, eager: nn.Module, batch: Mapping[str, Any]) -> None:
    """Output and every gradient are the eager model's."""
    model = scheduled.model
    model.zero_grad()
    eager.zero_grad()
    found = run(scheduled, batch)
    wanted = eager(**batch)
    loss_of(wanted).backward()
    given = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]
    expected = [t for t in torch.utils._pytree.tree_leaves(wanted) if isinstance(t, Tensor)]
    if isinstance(wanted, Mapping) and wanted.get("loss") is not None and model.training:
        expected = [wanted["loss"]]
    assert len(given) == len(expected)
    # To rounding: an eager model's keys go through a cache and lie in memory otherwise, uses of a parameter in several
    # stages are added in another order.
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in eager.named_parameters():
        one, other = gradients[name], parameter.grad
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


class Linears(nn.Module):
    """Four linears of width 4, called by the forward of each model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


class Skip(Linears):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first).relu()) + first)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            for linear in row:
                x = linear(x).tanh()
        return self.last(x)
