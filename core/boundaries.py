"""What crosses each boundary between two pipeline stages, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch

from .errors import GuardError
from .pipeline.cutting import examples_of, pipeline_of
from .pipeline.stages import holdings_of, subtree
from .tracing.examples import tensors_of

if TYPE_CHECKING:
    from .pipeline import Instance, Pipeline, Value, Wiring
    from .schedule import Schedule

# Names of sizes, in the order in which they are met: batch, sequence, and others.
_LETTERS = "BSTUVWXYZ"


def boundaries(sch: Schedule) -> str:
    """The stages of a schedule with cuts, and what crosses between them: shape, dtype, bytes, gradient.

    Sizes are letters, bytes are for the example inputs with which the schedule is traced. "" without cuts.
    """
    state = sch.state
    if not state.cuts:
        return ""
    try:
        pipeline = pipeline_of(state)
    except GuardError as error:
        return f"stages: cut after {', '.join(state.cuts)}, where the model cannot be split: {error}"
    wiring = pipeline.wirings[0]
    return "\n".join(_lines(pipeline, wiring, examples_of(state)))


def _lines(pipeline: Pipeline, wiring: Wiring, examples: Mapping[str, Any]) -> Iterator[str]:
    model = pipeline.skeleton
    inputs = wiring.values(model.train(), tensors_of(examples, model))
    instance, letters = wiring.at(inputs), dict(zip(wiring.symbols, map(sympy.Symbol, _LETTERS), strict=False))
    sizes = {str(letters[s]): inputs[name].shape[dim] for s, (name, dim) in wiring.symbols.items() if s in letters}
    yield f"stages ({', '.join(f'{letter}={size}' for letter, size in sizes.items())} in the bytes):"
    held = holdings_of(pipeline, model)
    for i, part in enumerate(wiring.parts):
        count = sum(parameter.numel() for parameter in subtree(model, held[i]).parameters())
        reads = f"; reads {', '.join(part.raw)} of the batch" if part.raw else ""
        yield f"  stage {i}: {part.modules[0]} to {part.modules[-1]}, {count:,} parameters{reads}"
        if part.sent:
            yield f"  after {wiring.cuts[i]}:"
        for value in part.sent:
            yield f"    {_crossing(value, instance, letters)}"


def _crossing(value: Value, instance: Instance, letters: dict[Any, Any]) -> str:
    shape = [size if isinstance(size, int) else sympy.sympify(size).xreplace(letters) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    size = torch.Size(instance.shape(value)).numel() * value.dtype.itemsize
    gradient = "and its gradient" if value.requires_grad else "no gradient"
    return f"{value.name} {shape} {dtype}, {size:,} bytes, {gradient}"
