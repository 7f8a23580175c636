"""Cuts a scheduled model: its pipeline, its stages and the part that this rank holds, or what is in the way."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..errors import GuardError, Problem
from ..mesh import Mesh
from ..state import State
from ..tracing.examples import default_inputs
from .pipeline import Pipeline, problems_around
from .stages import Holding, Stage, StageTie, holdings_of, shared_buffers, subtree, ties_of

# Which pipeline rank runs which stage: "loop" goes over the ranks again and again, "v" there and back.
Placement = Literal["loop", "v"]


@dataclass(frozen=True)
class Cut:
    """A cut model, or the ``problems`` that it has."""

    model: nn.Module
    pipeline: Pipeline | None = None
    stages: tuple[Stage, ...] = ()
    ties: tuple[StageTie, ...] = ()
    problems: tuple[Problem, ...] = ()


def cut_model(state: State, placement: Placement) -> Cut:
    """Cut ``state``'s model where its schedule says; the model itself is not changed."""
    model, mesh = state.model, state.mesh
    problems = [*_size_problems(state.cuts, mesh), *problems_around(model, state.cuts)]
    if problems:
        return Cut(model, problems=tuple(problems))
    try:
        pipeline = pipeline_of(state)
    except GuardError as error:
        hint = "cut after a module that contains it, or cut with inputs= that look like the batches"
        return Cut(model, problems=(Problem(f"the model cannot be traced down to its cuts: {error}", hint),))
    held = holdings_of(pipeline, model)
    ranks = [rank_of(stage, mesh.pp, placement) for stage in range(len(held))]
    by_rank = [
        functools.reduce(operator.or_, (holding for holding, other in zip(held, ranks, strict=True) if other == rank))
        for rank in range(mesh.pp)
    ]
    shared = shared_buffers(model, by_rank)
    if shared:
        found = f"{shared[0]!r} is held by several stages, which would not see what the others write to it"
        return Cut(model, problems=(Problem(found, "move the cuts so that one stage uses it"),))
    pipeline.held = tuple(held)
    own = model if mesh.pp == 1 else subtree(model, by_rank[mesh.pp_rank])
    stages = [
        Stage(i, own if ranks[i] == mesh.pp_rank else None, _parameters(model, holding))
        for i, holding in enumerate(held)
    ]
    return Cut(own, pipeline, tuple(stages), ties_of(model, by_rank))


def rank_of(stage: int, pp: int, placement: Placement) -> int:
    """The pipeline rank that runs ``stage``."""
    lap, place = divmod(stage, pp)
    return pp - 1 - place if placement == "v" and lap % 2 else place


def pipeline_of(state: State) -> Pipeline:
    """The pipeline of a schedule with cuts, traced for its example inputs. Raises GuardError."""
    key = (tuple(state.cuts), len(state.history))
    if state.pipeline is None or state.pipeline[0] != key:
        pipeline = Pipeline(state.model, state.cuts, state.only_output)
        pipeline.wiring(examples_of(state), training=True)
        state.pipeline = (key, pipeline)
    return state.pipeline[1]


def examples_of(state: State) -> Mapping[str, Any]:
    """The inputs with which the model is traced down to its cuts."""
    return state.example_inputs or default_inputs(state.model, state.mesh.tp)[0]


def _size_problems(cuts: Sequence[str], mesh: Mesh) -> list[Problem]:
    count = len(cuts) + 1
    if not cuts:
        return [
            Problem(f"the mesh has pp={mesh.pp}, and nothing cuts the model", "cut_pipeline_stage(), or automatic cuts")
        ]
    if count % mesh.pp:
        fits = f"{mesh.pp - 1} cuts make {mesh.pp} stages"
        return [Problem(f"{len(cuts)} cuts make {count} stages, which do not fit on pp={mesh.pp} ranks", fits)]
    return []


def _parameters(model: nn.Module, holding: Holding) -> tuple[str, ...]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(first[id(parameter)] for parameter in subtree(model, holding).parameters())
