"""What each module of two models computed, and the first module at which they part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from .collectives import gather_parts
from .layout import Layout
from .scheduled import ScheduledModel


class Probe:
    """Records outputs, and the gradients that arrive at them, of every module while it is open."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._handles = [
            module.register_forward_hook(self._recorder(path)) for path, module in model.named_modules() if path
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _recorder(self, path: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return
            # Re-inserted, so that the order is that of the last forward.
            self.outputs.pop(path, None)
            self.outputs[path] = first.detach().clone()
            if first.requires_grad:
                first.register_hook(lambda grad: self.gradients.__setitem__(path, grad.detach().clone()))

        return record


def first_difference(
    dense: Probe, probe: Probe, scheduled: ScheduledModel, limit: float, failed_names: Iterable[str]
) -> str | None:
    """The first module in execution order whose output differs; else whose output's gradient, going backward; else the
    owner of a parameter whose gradient differs. Collective over the tp group."""
    for path in dense.outputs:
        if _differs(dense.outputs, probe.outputs, path, scheduled, limit):
            return f"{path or 'the model'} (its output)"
    for path in reversed(dense.outputs):
        comparable = path in dense.gradients and not _has_replicas(scheduled, path)
        if comparable and _differs(dense.gradients, probe.gradients, path, scheduled, limit):
            return f"{path or 'the model'} (the gradient of its output)"
    owners = {name: name.rpartition(".")[0] for name in failed_names}
    for path in reversed(dense.outputs):
        if path in owners.values():
            return f"{path} (the gradient of its parameters)"
    return next(iter(owners.values()), None)


def _differs(
    dense: dict[str, Tensor], found: dict[str, Tensor], path: str, scheduled: ScheduledModel, limit: float
) -> bool:
    if path not in found:
        return False
    from .verify import error_of

    whole = _whole(found[path], dense[path].shape, _layout_of(scheduled, path), scheduled)
    mine = whole is not None and error_of(whole, dense[path]) > limit
    return _any_rank(mine, scheduled)


def _whole(x: Tensor, shape: torch.Size, layout: Layout | None, scheduled: ScheduledModel) -> Tensor | None:
    """The full tensor where this rank has a slice of it; None where the two cannot be compared."""
    if x.shape == shape:
        return x
    group = scheduled.mesh.tp_group
    if group is None or x.ndim != len(shape):
        return None
    dims = [dim for dim in range(x.ndim) if x.shape[dim] != shape[dim]]
    parts = gather_parts(x, group)
    if layout is not None and dims == [x.ndim - 1]:
        whole = layout.merge(parts, axis=-1)
    else:
        whole = torch.cat(parts, dim=dims[0])
    return whole if whole.shape == shape else None


def _any_rank(mine: bool, scheduled: ScheduledModel) -> bool:
    group = scheduled.mesh.tp_group
    if group is None:
        return mine
    device = next(scheduled.model.parameters()).device
    return bool(torch.stack(gather_parts(torch.tensor(int(mine), device=device), group)).any())


def _layout_of(scheduled: ScheduledModel, path: str) -> Layout | None:
    names = [name for name, parameter in _named(scheduled, path) if name.endswith("weight")]
    return scheduled.layouts.get(names[0]) if names else None


def _has_replicas(scheduled: ScheduledModel, path: str) -> bool:
    """Ranks that share a slice each see a part of the gradient of its output."""
    layout = _layout_of(scheduled, path)
    return layout is not None and layout.replicas > 1


def _named(scheduled: ScheduledModel, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    canonical = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
    try:
        module = scheduled.model.get_submodule(path)
    except AttributeError:
        return
    for parameter in module._parameters.values():
        if parameter is not None:
            yield canonical[id(parameter)], parameter
