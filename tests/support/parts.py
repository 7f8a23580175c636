"""All ranks in one process, and a way back from their parts that shares no code with ``consolidate`` but ``Layout``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import models
from partbook.core import Mesh, ScheduledModel, apply_schedule, build, create_schedule


def scheduled_rank(
    name: str, tp: int = 1, rank: int = 0, options: Any = None, *, meta: bool = False, **config: Any
) -> ScheduledModel:
    """``models.<name>`` with its schedule, as ``rank`` of a virtual mesh has it."""
    make = getattr(models, name)
    model = models.on_meta(make, **config) if meta else make(**config)
    sch = create_schedule(model, Mesh(tp=tp, rank=rank))
    return build(apply_schedule(sch, "gpt2" if name == "gpt2" else "llama", options))


def scheduled_ranks(name: str, tp: int, options: Any = None, **config: Any) -> list[ScheduledModel]:
    """All ranks of the tp group, one after the other in this process."""
    return [scheduled_rank(name, tp, rank, options, **config) for rank in range(tp)]


def merged(ranks: Sequence[ScheduledModel]) -> dict[str, Tensor]:
    """The original parameters by their first names, out of the scheduled models of all tp ranks, in rank order."""
    found: dict[str, Tensor] = {}
    first = ranks[0]
    parameters = [dict(scheduled.model.named_parameters()) for scheduled in ranks]
    for name in parameters[0]:
        parts = [own[name].detach() for own in parameters]
        layout = first.layouts.get(name)
        if layout is None:
            assert all(part.equal(parts[0]) for part in parts), f"{name} is replicated, but not equal"
        else:
            replicas = layout.replicas
            assert all(part.equal(parts[i // replicas * replicas]) for i, part in enumerate(parts)), name
        whole = layout.merge(parts) if layout else parts[0]
        for original, tensor in first.weights[name].invert(whole, first.original.shapes):
            assert original not in found
            found[original] = tensor
    order = list(first.original.shapes)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))
