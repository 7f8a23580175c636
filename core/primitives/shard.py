"""``shard``: split a parameter over the tp ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..errors import Problem
from ..execution import change_plan, plan_of
from ..layout import Layout
from ..primitive import Primitive, Site
from ..roles import adapt, differs

# annotate's key for a replicated parameter of whose uses each tp rank's backward sees a part
PARTIAL_GRADIENT = "partial_gradient"


@dataclass(frozen=True)
class Shard(Primitive):
    """Split parameter ``param`` over the tp ranks along ``axis``; this rank keeps its slice.

    Shapes, for ``fc = nn.Linear(8, 64)`` and tp=2::

        fc.weight (64, 8)  --shard("weight", axis=0)-->  (32, 8)      column parallel: the output is split
        fc.weight (64, 8)  --shard("weight", axis=1)-->  (64, 4)      row parallel: the output is a partial sum

    Args: ``segments`` are sizes along ``axis`` that are split each by itself, as q, k and v in one weight. ``replicas``
    neighbouring ranks hold the same slice and their gradients are summed (kv heads fewer than ranks). ``pad`` adds rows
    of zeros where the size does not divide (a vocabulary); they never appear in a full tensor.

    What comes out split or partial needs a ``sync`` before its next full-width use. A tied parameter is split once,
    through any of its names.
    """

    verb: ClassVar[str] = "shard"
    param: str
    axis: int
    segments: tuple[int, ...] | None = None
    replicas: int = 1
    pad: bool = False

    def __post_init__(self) -> None:
        if self.segments is not None:
            object.__setattr__(self, "segments", tuple(self.segments))

    def check(self, site: Site) -> Iterator[Problem]:
        missing = list(site.missing_parameter(self.param))
        if missing:
            yield from missing
            return
        name = site.full_name(self.param)
        shape = site.state.full_shape(name)
        if name in site.state.layouts:
            yield Problem(f"{name} is sharded already: {site.state.layouts[name]}", "shard a parameter once")
        elif not -len(shape) <= self.axis < len(shape):
            yield Problem(f"axis {self.axis} is out of range for {name} of shape {list(shape)}")
        else:
            yield from self._check_sizes(name, shape[self.axis], site.mesh.tp)
            yield from self._check_module(site)

    def _check_sizes(self, name: str, size: int, tp: int) -> Iterator[Problem]:
        if self.replicas < 1 or tp % self.replicas:
            yield Problem(f"replicas={self.replicas} does not divide tp={tp}")
            return
        segments = self.segments or (size,)
        if min(segments) < 1:
            yield Problem(f"a segment of {min(segments)} is no part of {name}")
            return
        if sum(segments) != size:
            yield Problem(
                f"segments {list(segments)} add up to {sum(segments)}, but axis {self.axis} of {name} is {size}"
            )
        if self.pad and len(segments) > 1:
            yield Problem("only an unsegmented parameter can be padded")
        slices = tp // self.replicas
        for segment in segments:
            if segment % slices and not self.pad:
                works = [n for n in range(2, min(segment, 1024) + 1) if segment % n == 0][:8]
                yield Problem(
                    f"size {segment} of axis {self.axis} of {name} does not divide by "
                    + (f"tp={tp}" if self.replicas == 1 else f"{slices} slices (tp={tp}, replicas={self.replicas})"),
                    f"tp could be one of {works}" if works else "",
                )

    def _check_module(self, site: Site) -> Iterator[Problem]:
        parameter = site.module.get_parameter(self.param)
        if parameter.grad is not None:
            yield Problem(f"{self.param} holds a gradient of its full shape", "zero_grad(set_to_none=True) first")
        name = site.full_name(self.param)
        if PARTIAL_GRADIENT in site.state.annotations.get(name, {}):
            yield Problem(f"{name} has a partial gradient", "leave that out: a rank has its slice's whole gradient")
        for module, path, own_name in site.state.owners(parameter):
            if own_name == "weight" and site.state.syncs.get(path):
                yield Problem(
                    f"{path!r} has a sync already, which was checked against the whole weight", "shard first, then sync"
                )
            known = differs(module)
            if known is not None and own_name == "weight":
                yield Problem(
                    f"{path!r}, derived from {known.__name__}, has its own forward: what a slice computes is not known",
                    "replace it by modules that are known, then shard these",
                )
            if not isinstance(module, nn.Embedding) or self.axis % parameter.ndim != 0:
                continue
            unsupported = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
            if unsupported:
                yield Problem(f"the embedding {path!r} uses {', '.join(unsupported)}, which a slice cannot honour")

    def touches(self, site: Site) -> Iterator[str]:
        # a tied parameter has several modules
        return (path for _, path, _ in site.state.owners(site.module.get_parameter(self.param)))

    def apply(self, site: Site) -> None:
        state, mesh = site.state, site.mesh
        parameter = site.module.get_parameter(self.param)
        name = site.full_name(self.param)
        shape = state.full_shape(name)
        axis = self.axis % len(shape)
        padding = -shape[axis] % mesh.tp if self.pad else 0
        layout = Layout(axis, shape, self.segments or (shape[axis],), mesh.tp, self.replicas, padding)
        with torch.no_grad():
            # Setting .data keeps the Parameter, so optimizers that know it stay valid.
            parameter.data = layout.split(parameter.data, mesh.tp_rank).clone()
        state.layouts[name] = layout
        for module, _, own_name in list(state.owners(parameter)):
            adapt(module, own_name, layout, mesh)
            if self.replicas > 1:
                sums_gradient(module, own_name, self.replicas, site)


def sums_gradient(module: nn.Module, name: str, sharers: int, site: Site) -> None:
    """From now on the gradient of this parameter is summed over the ``sharers`` neighbouring ranks that hold it."""
    if site.mesh.tp == 1:
        return
    plan = plan_of(module)
    known = dict(plan.partial_gradients) if plan else {}
    change_plan(module, site.mesh, partial_gradients={**known, name: sharers})
