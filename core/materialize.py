"""Fill a scheduled model with weights: only this rank's slices, from wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import WeightsError
from .sources import FreshSource, Source, find_source
from .weights import Expression

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .scheduled import ScheduledModel


def materialize(
    scheduled: ScheduledModel,
    source: nn.Module | Mapping[str, Tensor] | str | Path | int,
    *,
    device: torch.device | str | None = None,
) -> ScheduledModel:
    """Fill every parameter and buffer of ``scheduled`` from ``source``; returns it.

    ``source`` is a dense model or its state dict, a Hugging Face folder (safetensors, one file or an index), or an int:
    the seed of the model's own initialisation, which gives the same full weights whatever the mesh. Peak memory is this
    rank's part plus one full parameter. dtypes stay those of the model; meta tensors land on ``device`` (cpu).

    Raises WeightsError, before anything changes, for a tensor that is missing or has another shape.
    """
    found = find_source(source, scheduled.original)
    _check(scheduled, found)
    buffers = list(_made_buffers(scheduled, found, device))
    made: list[tuple[nn.Parameter, Tensor]] = []
    for name, parameter in list(scheduled.model.named_parameters()):
        local = _read_local(scheduled, name, found)
        if isinstance(found, FreshSource) or _is_replaced(parameter, device):
            # A copy, so that no slice keeps a full tensor alive while the next is made, or shares the source's memory.
            target = device or ("cpu" if parameter.is_meta else parameter.device)
            local = torch.empty(local.shape, dtype=parameter.dtype, device=target).copy_(local)
        if isinstance(found, FreshSource):
            # That initialisation leaves a tensor alone shows only when tried: nothing changes before all are made.
            made.append((parameter, local))
        else:
            _put(scheduled.model, parameter, local, device)
    for parameter, local in made:
        _put(scheduled.model, parameter, local, device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    return scheduled


def _check(scheduled: ScheduledModel, source: Source) -> None:
    original, problems = scheduled.original, []
    present = {f"{path}.{name}".lstrip(".") for _, path, name, _ in _buffers(scheduled.model)}
    buffers = [name for name in original.buffers if name in original.keys and name in present]
    for name in [*(name for expression in scheduled.weights.values() for name in expression.names()), *buffers]:
        shape, wanted = source.shape(name), original.shapes[name]
        if shape is None:
            problems.append(source.describe(name))
        elif shape != wanted:
            problems.append(f"{name!r} is {list(shape)} there, but {list(wanted)} in the model")
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WeightsError("these weights do not fit the model:\n  " + "\n  ".join(problems[:8]) + more)


def _read_local(scheduled: ScheduledModel, name: str, source: Source) -> Tensor:
    """This rank's part of the parameter, reading no more than that."""
    expression, layout = scheduled.weights[name], scheduled.layouts.get(name)
    axis = layout.axis if layout else 0
    full = scheduled.full_shape(name)
    ranges = layout.ranges(scheduled.mesh.tp_rank) if layout else [(0, full[0] if full else 1)]
    pieces = [_read(expression, source, scheduled, axis, start, stop) for start, stop in ranges]
    return layout.assemble(pieces) if layout else pieces[0]


def _read(
    expression: Expression, source: Source, scheduled: ScheduledModel, axis: int, start: int, stop: int
) -> Tensor:
    return expression.read(source.read, scheduled.original.shapes, axis, start, stop)


def _is_replaced(parameter: nn.Parameter, device: torch.device | str | None) -> bool:
    return parameter.is_meta or device is not None


def _put(model: nn.Module, parameter: nn.Parameter, local: Tensor, device: torch.device | str | None) -> None:
    """Into the parameter itself where it is real, else into a new one in its place, ties kept."""
    if not _is_replaced(parameter, device):
        with torch.no_grad():
            parameter.copy_(local)
        return
    made = nn.Parameter(local, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is parameter:
                module._parameters[name] = made


def _made_buffers(
    scheduled: ScheduledModel, source: Source, device: torch.device | str | None
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(module, name, new value) of every buffer."""
    fresh = source if isinstance(source, FreshSource) else FreshSource(0, scheduled.original)
    for module, path, name, buffer in _buffers(scheduled.model):
        full_name = f"{path}.{name}".lstrip(".")
        shape = source.shape(full_name)
        if source is fresh and not buffer.is_meta and not fresh.initialises(full_name):
            # What its constructor computed is its initialisation.
            value = buffer
        elif shape is not None and shape == tuple(buffer.shape):
            value = source.read(full_name, 0, 0, shape[0] if shape else 1)
        elif buffer.is_meta:
            # Computed by the model, as rotary frequencies are: files do not hold them.
            value = fresh.read(full_name, 0, 0, buffer.shape[0] if buffer.ndim else 1)
        else:
            value = buffer
        target = device or ("cpu" if buffer.is_meta else buffer.device)
        yield module, name, value.to(target, buffer.dtype, copy=value is not buffer)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield module, path, name, buffer
