"""A schedule as a tree: class, shapes, shards, syncs, recomputation and random streams of every module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from .boundaries import boundaries
from .execution import plan_of
from .primitives.annotate import PARTIAL_GRADIENT
from .state import State
from .tracing.traced import Traced

if TYPE_CHECKING:
    from .schedule import Schedule


def tree(sch: Schedule) -> str:
    """The node and everything below it, one module a line; equal neighbours are shown once."""
    title = sch.path or "(model)"
    mesh = sch.mesh
    head = f"{title}: {_line(sch.state, sch.path, sch.module)}"
    if not sch.path:
        head += f"   [dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, rank {mesh.rank}{', virtual' if mesh.is_virtual else ''}]"
    lines = [head, *_below(sch.state, sch.path, sch.module, "  ")]
    if not sch.path and sch.state.cuts:
        lines.append(boundaries(sch))
    return "\n".join(lines)


def _below(state: State, path: str, module: nn.Module, indent: str) -> Iterator[str]:
    blocks: list[tuple[list[str], list[str]]] = []
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        lines = [_line(state, below, child), *_below(state, below, child, indent + "  ")]
        if blocks and blocks[-1][1] == lines and name.isdigit():
            blocks[-1][0].append(name)
        else:
            blocks.append(([name], lines))
    for names, (first, *rest) in blocks:
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield f"{indent}{label}: {first}"
        yield from rest


def _line(state: State, path: str, module: nn.Module) -> str:
    parts = [type(module).__name__]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            layout = state.layouts.get(state.canonical(parameter))
            parts.append(f"{name} {list(parameter.shape)}" + (f" ({layout})" if layout else ""))
            notes = state.annotations.get(state.canonical(parameter), {})
            parts += [f"{key} of {name}: {value!r}" for key, value in notes.items() if key != PARTIAL_GRADIENT]
    parts += [sync.as_call() for sync in state.syncs.get(path, ())]
    parts += ["sharded loss"] if path in state.sharded_losses else []
    plan = plan_of(module)
    if plan is not None:
        parts += ["checkpoint"] if plan.checkpoint else []
        parts += ["decomposed"] if plan.decomposed else []
        if isinstance(plan.graph, Traced):
            parts += ["traced", *(rewrite.summary for rewrite in plan.graph.rewrites)]
        parts += [f"{plan.random} rng"] if plan.random != "default" else []
        parts += [f"gradient of {name} summed over {n}" for name, n in plan.partial_gradients.items()]
    parts += ["| end of a stage"] if path in state.cuts else []
    return "  ".join(parts)
