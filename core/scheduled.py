"""The scheduled model: what the core hands to a dialect, and the last check before it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .consolidate import guard_save_pretrained
from .errors import Problem, ScheduleError, user_line
from .history import History
from .layout import Layout
from .mesh import Mesh
from .primitive import Site
from .primitives.trace import unfinished
from .roles import kind_of, output_of
from .state import Original, State
from .weights import Expression, Source

if TYPE_CHECKING:
    from .primitives.sync import Sync
    from .schedule import Schedule


@dataclass(frozen=True)
class ScheduledModel:
    """Everything that a dialect may need, and nothing of any framework.

    Names are those of ``model``'s present parameters, the first one where a parameter is tied. ``weights`` says what
    each is made of, ``layouts`` how it is split, ``ties`` maps every further name of an original tied tensor to its
    first. ``annotations`` are the user's, with ``partial_gradient`` among them.
    """

    model: nn.Module
    mesh: Mesh
    original: Original
    weights: Mapping[str, Expression]
    layouts: Mapping[str, Layout]
    syncs: Mapping[str, tuple[Sync, ...]]
    annotations: Mapping[str, Mapping[str, Any]]
    history: History

    @property
    def ties(self) -> Mapping[str, str]:
        return self.original.ties

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The unsharded, unpadded shape of the present parameter ``name``."""
        return self.weights[name].shape(self.original.shapes)

    def counts_here(self, name: str) -> bool:
        """Whether this rank counts the parameter in a sum over the tp group that takes every element once."""
        layout, rank = self.layouts.get(name), self.mesh.tp_rank
        return layout.is_first_replica(rank) if layout else rank == 0


def build(sch: Schedule) -> ScheduledModel:
    """The scheduled model of a finished schedule. Raises ScheduleError for rules that one primitive cannot see."""
    state = sch.state
    problems = [
        Problem(f"{path or 'the model'}: {problem.found}", problem.hint)
        for path, module in state.model.named_modules()
        for problem in (*_unfinished(state, path, module), *unfinished(Site(state, path)))
    ]
    if problems:
        raise ScheduleError("build(sch)", problems, user_line())
    scheduled = ScheduledModel(
        model=state.model,
        mesh=state.mesh,
        original=state.original,
        weights=dict(state.weights),
        layouts=dict(state.layouts),
        syncs={path: tuple(syncs) for path, syncs in state.syncs.items()},
        annotations=dict(state.annotations),
        history=state.history,
    )
    if state.layouts or any(not isinstance(made, Source) for made in state.weights.values()):
        guard_save_pretrained(scheduled)
    return scheduled


def _unfinished(state: State, path: str, module: nn.Module) -> Iterator[Problem]:
    """What a shard of ``module`` still needs before the model computes what the untouched one does."""
    kind = kind_of(module)
    if kind is None:
        return
    layouts = {
        name: state.layouts.get(state.canonical(parameter))
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    weight, bias = layouts.get("weight"), layouts.get("bias")
    output = output_of(module, weight)
    after = [sync for sync in state.syncs.get(path, ()) if sync.mode == "fwd_post"]
    if output == "partial" and not after:
        yield Problem("its output is a partial sum that nothing reduces", 'sync("fwd_post", "all_reduce")')
    if output == "partial" and bias is not None:
        yield Problem("the bias of a row-parallel module is added once, whole, so it cannot be sharded")
    if output == "split" and "bias" in layouts and bias is None:
        yield Problem("its weight is split along the output, its bias is not", 'shard("bias", axis=0, ...)')
    if output == "split" and bias is not None and weight is not None and not _alike(bias, weight):
        yield Problem(f"weight and bias are split differently: {weight} and {bias}")
    if output == "split" and weight is not None and weight.padding and not after and path not in state.sharded_losses:
        yield Problem(
            "its padded columns would win a part of the softmax", 'shard_loss or sync("fwd_post", "all_gather")'
        )


def _alike(bias: Layout, weight: Layout) -> bool:
    return (bias.segments, bias.replicas, bias.padding) == (weight.segments, weight.replicas, weight.padding)
