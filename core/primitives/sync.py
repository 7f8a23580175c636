"""``sync``: a collective where a module's input, output or input gradient meets the tensor-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import collectives
from ..errors import Problem, did_you_mean
from ..execution import Plan, argument_names, change_plan, plan_of
from ..execution import Sync as PlannedSync
from ..layout import Layout
from ..mesh import Mesh
from ..overlap import OverlappedColumn
from ..primitive import Primitive, Site
from ..roles import keeps_in_out, output_of
from .shard import sums_gradient

Mode = Literal["fwd_pre", "fwd_post", "bwd_post"]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "scatter"]
CustomOp = Callable[[Tensor, ProcessGroup], Tensor]

_MODES = ("fwd_pre", "fwd_post", "bwd_post")
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")


@dataclass(frozen=True)
class Sync(Primitive):
    """Communicate over the tp ranks at this module's boundary; each op brings its own backward.

    ==========  ================  ============================================  ==============================
    mode        op                forward                                       backward
    ==========  ================  ============================================  ==============================
    fwd_post    all_reduce        sum the partial outputs                       identity
    fwd_post    reduce_scatter    sum, keep this rank's slice of ``axis``       all-gather
    fwd_post    all_gather        whole output for a replicated consumer        own slice
    fwd_pre     all_gather        whole input for this parallel module          reduce-scatter
    either      scatter           own slice of ``axis``                         all-gather
    bwd_post    all_reduce        identity                                      sum the gradients of the inputs
    ==========  ================  ============================================  ==============================

    On a column-parallel linear itself, the sum of ``bwd_post`` runs while the weight gradient is computed.

    ``fwd_pre`` acts on the first floating-point tensor that the module is called with, or on the argument named
    ``argument``; ``fwd_post`` on the output, or the first of a tuple; ``bwd_post`` on every input that takes a
    gradient. A callable op gets (tensor, group) and brings its own backward; with ``bwd_post`` it gets the gradient.
    """

    verb: ClassVar[str] = "sync"
    mode: Mode
    op: Op | CustomOp
    axis: int | None = None
    argument: str | None = None

    def check(self, site: Site) -> Iterator[Problem]:
        if self.mode not in _MODES:
            yield Problem(f"no mode {self.mode!r}", did_you_mean(self.mode, _MODES))
            return
        if isinstance(self.op, str):
            yield from self._check_op(site)
        if self.argument is not None:
            known = argument_names(site.module)
            if self.argument not in known:
                yield Problem(f"forward has no argument {self.argument!r}", did_you_mean(self.argument, known))
        for other in site.state.syncs.get(site.path, ()):
            if (other.mode, other.op, other.argument) == (self.mode, self.op, self.argument):
                yield Problem(f"it has this sync already: {other.as_call()}")
            if {(other.mode, other.op), (self.mode, self.op)} == {
                ("fwd_pre", "all_gather"),
                ("bwd_post", "all_reduce"),
            }:
                yield Problem("the backward of fwd_pre all_gather sums the gradients already", "leave out bwd_post")

    def _check_op(self, site: Site) -> Iterator[Problem]:
        assert isinstance(self.op, str)
        if self.op not in _OPS:
            yield Problem(f"no op {self.op!r}", did_you_mean(self.op, _OPS) + " (or pass a function)")
            return
        if self.op == "all_reduce" and self.axis is not None:
            yield Problem("all_reduce takes no axis")
        if self.op != "all_reduce" and self.axis is None:
            yield Problem(f"{self.op} needs an axis", "axis=1 is the sequence, axis=-1 the hidden dimension")
            return
        if self.mode == "bwd_post" and self.op != "all_reduce":
            yield Problem(
                f"bwd_post {self.op} is not needed", "fwd_pre all_gather reduce-scatters, scatter all-gathers"
            )
            return
        if self.mode == "fwd_pre" and self.op in ("all_reduce", "reduce_scatter"):
            yield Problem(f"{self.op} before a module would add its equal inputs", "all_gather or scatter")
            return
        yield from self._check_output(site)

    def _check_output(self, site: Site) -> Iterator[Problem]:
        """The op must fit what the module's layout makes of its output."""
        output = output_of(site.module, _weight_layout(site))
        if self.mode == "bwd_post" and output == "partial":
            yield Problem(
                "the input of a row-parallel module is split, so its gradient is complete",
                "the sync belongs to the column-parallel module (or their parent) before it",
            )
        if self.mode != "fwd_post" or output is None:
            return
        along_last = self.axis in (-1, 2)
        if output == "split" and self.op in ("all_reduce", "reduce_scatter"):
            yield Problem(
                f"the weight is split along its output, so the ranks hold different columns: {self.op} would add them",
                'all_gather with axis=-1, or a row-parallel module after it with sync("fwd_post", "all_reduce")',
            )
        elif output == "split" and self.op == "scatter":
            yield Problem(
                "the weight is split along its output: of different columns, scatter would keep different rows"
            )
        elif output == "split" and self.op == "all_gather" and not along_last:
            yield Problem(f"the output is split along its last dim, not along {self.axis}", "axis=-1")
        elif output == "partial" and self.op in ("all_gather", "scatter"):
            yield Problem(
                f"the output is a partial sum, which {self.op} would leave unsummed", "all_reduce or reduce_scatter"
            )
        elif output == "partial" and self.op == "reduce_scatter" and along_last:
            yield Problem("the output would be split along its last dim, its bias is not", "axis=1 is the sequence")
        elif output == "whole" and self.op in ("all_reduce", "reduce_scatter"):
            yield Problem(
                f"nothing of it is split, so {self.op} would add {site.mesh.tp} equal outputs", "shard it first"
            )

    def apply(self, site: Site) -> None:
        site.state.syncs.setdefault(site.path, []).append(self)
        if site.mesh.tp == 1:
            return
        plan = plan_of(site.module)
        if self.mode == "bwd_post" and self.op == "all_reduce" and self._is_column(site) and self.argument is None:
            change_plan(site.module, site.mesh, kernel=OverlappedColumn(site.mesh, keeps_in_out(site.module)))
            return
        planned = PlannedSync(self.mode, str(self.op), self._function(site, plan), self.argument)
        change_plan(site.module, site.mesh, syncs=(*(plan.syncs if plan else ()), planned))
        plan = plan_of(site.module)
        if self.op == "reduce_scatter" and plan is not None and plan.deferred_bias:
            # Each rank adds the bias to its own part of the sequence only.
            sums_gradient(site.module, "bias", site.mesh.tp, site)

    def _is_column(self, site: Site) -> bool:
        return output_of(site.module, _weight_layout(site)) == "split" and not isinstance(site.module, nn.Embedding)

    def _function(self, site: Site, plan: Plan | None) -> Callable[[Tensor], Tensor]:
        if self.mode == "fwd_post" and self.op == "all_reduce" and plan is not None and plan.kernel is not None:
            # What our own kernels return is theirs alone.
            return functools.partial(_reduce_in_place, site.mesh)
        layout = _weight_layout(site) if self.mode == "fwd_post" and self.op == "all_gather" else None
        return functools.partial(_communicate, self, site.mesh, layout)


def _reduce_in_place(mesh: Mesh, x: Tensor) -> Tensor:
    return collectives.reduce_forward_(x.contiguous(), mesh.group())


def _communicate(sync: Sync, mesh: Mesh, layout: Layout | None, x: Tensor) -> Tensor:
    group = mesh.group()
    if not isinstance(sync.op, str):
        op = sync.op
        return collectives.pair(x, lambda t: t, lambda g: op(g, group)) if sync.mode == "bwd_post" else op(x, group)
    if sync.op == "all_reduce":
        return (
            collectives.reduce_backward(x, group) if sync.mode == "bwd_post" else collectives.reduce_forward(x, group)
        )
    axis = sync.axis
    assert axis is not None
    if sync.op == "scatter":
        return collectives.scatter(x, axis, group)
    if sync.op == "reduce_scatter":
        return collectives.reduce_scatter(x, axis, group)
    if sync.mode == "fwd_pre":
        return collectives.gather_into_parallel(x, axis, group)
    if layout is None:
        return collectives.gather_into_replicated(x, axis, group)
    return gather_columns(x, layout, mesh)


def gather_columns(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The whole last dim of a column-parallel output, segments in order, padding dropped; own slice backward."""
    group = mesh.group()
    return collectives.pair(
        x,
        lambda t: layout.merge(collectives.gather_parts(t, group), axis=-1),
        lambda grad: layout.split(grad, mesh.tp_rank, axis=-1).contiguous(),
    )


def _weight_layout(site: Site) -> Layout | None:
    weight = site.module._parameters.get("weight")
    return None if weight is None else site.state.layouts.get(site.state.canonical(weight))
