"""The scheduled model: what the core hands to a dialect, and the last check before it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from .consolidate import guard_save_pretrained
from .errors import Problem, ScheduleError, user_line
from .history import History
from .layout import Layout
from .mesh import Mesh
from .pipeline.cutting import Placement, cut_model
from .pipeline.pipeline import Pipeline
from .pipeline.stages import Stage, StageTie
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

    Where the model is cut, ``stages`` are all its stages, in order; pipeline rank i modulo pp runs stage i, unless it
    was built with another placement. With pp > 1 ``model`` is this rank's part: the modules of its stages under their
    original paths. ``pipeline`` says what each stage does with a batch, ``ties_across`` which parameters several
    pipeline ranks hold.
    """

    model: nn.Module
    mesh: Mesh
    original: Original
    weights: Mapping[str, Expression]
    layouts: Mapping[str, Layout]
    syncs: Mapping[str, tuple[Sync, ...]]
    annotations: Mapping[str, Mapping[str, Any]]
    history: History
    stages: tuple[Stage, ...] = ()
    pipeline: Pipeline | None = None
    ties_across: tuple[StageTie, ...] = ()

    @property
    def ties(self) -> Mapping[str, str]:
        return self.original.ties

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The unsharded, unpadded shape of the present parameter ``name``."""
        return self.weights[name].shape(self.original.shapes)

    def is_copy(self, name: str) -> bool:
        """Whether an earlier pipeline rank holds the parameter too."""
        rank = self.mesh.pp_rank
        return any(tie.names.get(rank) == name and tie.ranks[0] != rank for tie in self.ties_across)

    def counts_here(self, name: str) -> bool:
        """Whether this rank counts the parameter in a sum over tp and pp that takes every element once."""
        if self.is_copy(name):
            return False
        layout, rank = self.layouts.get(name), self.mesh.tp_rank
        return layout.is_first_replica(rank) if layout else rank == 0


def build(sch: Schedule, placement: Placement = "loop") -> ScheduledModel:
    """The scheduled model of a finished schedule. Raises ScheduleError for rules that one primitive cannot see.

    ``placement``: which pipeline rank runs which stage, where there are more stages than ranks.
    """
    state = sch.state
    check_finished(sch)
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
    if state.cuts or state.mesh.pp > 1:
        scheduled = _with_stages(scheduled, sch, placement)
    if scheduled.model is not state.model or state.layouts or _are_remade(state):
        guard_save_pretrained(scheduled, state.model)
    return scheduled


def check_finished(sch: Schedule) -> None:
    """Raise ScheduleError for rules that one primitive cannot see, but for those of stages."""
    problems = [
        Problem(f"{path or 'the model'}: {problem.found}", problem.hint)
        for path, module in sch.state.model.named_modules()
        for problem in (*_unfinished(sch.state, path, module), *unfinished(Site(sch.state, path)))
    ]
    if problems:
        raise ScheduleError("build(sch)", problems, user_line())


def _are_remade(state: State) -> bool:
    return any(not isinstance(made, Source) for made in state.weights.values())


def _with_stages(scheduled: ScheduledModel, sch: Schedule, placement: Placement) -> ScheduledModel:
    """Cut as the schedule says. Raises ScheduleError where it cannot be, or does not fit the mesh."""
    state = sch.state
    cut = cut_model(state, placement)
    if cut.problems:
        raise ScheduleError("build(sch)", cut.problems, user_line())
    names = {name: state.canonical(parameter) for name, parameter in cut.model.named_parameters()}
    return replace(
        scheduled,
        model=cut.model,
        weights={name: state.weights[known] for name, known in names.items()},
        layouts={name: state.layouts[known] for name, known in names.items() if known in state.layouts},
        annotations={name: state.annotations[known] for name, known in names.items() if known in state.annotations},
        stages=cut.stages,
        pipeline=cut.pipeline,
        ties_across=cut.ties,
    )


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
