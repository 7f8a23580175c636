"""Fill a scheduled model with weights: only this rank's slices, from wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import WeightsError
from .sources import Source, find_source
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
    for name, parameter in list(scheduled.model.named_parameters()):
        local = _read_local(scheduled, name, found).to(parameter.dtype)
        _put(scheduled.model, parameter, local, device)
    _fill_buffers(scheduled, found, source, device)
    return scheduled


def _check(scheduled: ScheduledModel, source: Source) -> None:
    problems = []
    for expression in scheduled.weights.values():
        for name in expression.names():
            shape, wanted = source.shape(name), scheduled.original.shapes[name]
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


def _read(expression: Expression, source: Source, scheduled: ScheduledModel, axis: int, start: int, stop: int) -> Tensor:
    return expression.read(source.read, scheduled.original.shapes, axis, start, stop)


def _put(model: nn.Module, parameter: nn.Parameter, local: Tensor, device: torch.device | str | None) -> None:
    """Into the parameter itself where it is real, else into a new one in its place, ties kept."""
    if not parameter.is_meta and device is None:
        with torch.no_grad():
            parameter.copy_(local)
        return
    # A copy, so that no slice keeps a full tensor alive, nor shares memory with the source.
    made = nn.Parameter(local.to(device or "cpu", copy=True).contiguous(), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is parameter:
                module._parameters[name] = made


def _fill_buffers(
    scheduled: ScheduledModel, source: Source, given: object, device: torch.device | str | None
) -> None:
    for module, path, name, buffer in _buffers(scheduled.model):
        full_name = f"{path}.{name}".lstrip(".")
        shape = source.shape(full_name)
        if shape is not None and shape == tuple(buffer.shape):
            value = source.read(full_name, 0, 0, shape[0] if shape else 1)
        elif buffer.is_meta:
            # Computed by the model, as rotary frequencies are: files do not hold them.
            fresh = find_source(0, scheduled.original)
            value = fresh.read(full_name, 0, 0, buffer.shape[0] if buffer.ndim else 1)
        else:
            value = buffer
        module._buffers[name] = value.to(device or ("cpu" if buffer.is_meta else buffer.device), buffer.dtype)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield module, path, name, buffer
