"""A model that a run on fake tensors leaves as it was: attributes, buffers, random streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..rng import get_streams, set_streams

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set)
_INTERNALS = frozenset(vars(nn.Module()))
# transformers installs its hooks for intermediate outputs on the first call: a later run would install them again
_KEPT = "_output_capturing_hooks_installed"


class Untouched:
    """Inside, the modules of ``model`` may change; afterwards each has the attributes that it had before.

    Buffers are copies inside: a write whose operands are all real really happens, even on fake tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._modes = ModesKept()

    def __enter__(self) -> None:
        self._streams = get_streams()
        self._modes.__enter__()
        self._contents = [_Contents(value) for value in _plain_values(self._modules)]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        # it would keep fake casts of real weights
        torch.set_autocast_cache_enabled(False)
        self._before = [_state(module) for module in self._modules]
        copies: dict[int, Tensor] = {}
        for module in self._modules:
            # recomputing is not the business of a run that computes nothing
            if module.__dict__.get("gradient_checkpointing"):
                module.__dict__["gradient_checkpointing"] = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())

    def __exit__(self, *error: Any) -> None:
        for module, (attributes, registries) in zip(self._modules, self._before, strict=True):
            installed = module.__dict__.get(_KEPT)
            for name, content in registries.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            if installed:
                module.__dict__[_KEPT] = installed
        for contents in self._contents:
            contents.restore()
        self._modes.__exit__(*error)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        set_streams(self._streams)


class ModesKept:
    """An error inside leaves gradient mode and autocast as they were, as the blocks do that a graph has unrolled."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._devices = ["cpu", *([accelerator.type] if accelerator is not None else [])]
        self._stack: list[Any] = []

    def __enter__(self) -> None:
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        self._stack.append((torch.is_grad_enabled(), nesting, [_autocast_state(device) for device in self._devices]))

    def __exit__(self, kind: Any, *error: object) -> None:
        gradients, nesting, autocast = self._stack.pop()
        if kind is None:
            return
        torch.set_grad_enabled(gradients)
        for device, (enabled, dtype) in zip(self._devices, autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > nesting:
            pass


class _Contents:
    """What a list, a dictionary, a set or a plain object (a configuration) has, to be put back in place."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._content = type(value)(value) if type(value) in _CONTAINERS else dict(vars(value))

    def restore(self) -> None:
        value: Any = self._value
        if isinstance(value, list):
            value[:] = self._content
        else:
            target = value if type(value) in _CONTAINERS else vars(value)
            target.clear()
            target.update(self._content)


def _plain_values(modules: list[nn.Module]) -> list[Any]:
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in module.__dict__.items():
            is_plain = type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__")
            is_plain = is_plain and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
            if name not in _INTERNALS and (type(value) in _CONTAINERS or is_plain):
                found[id(value)] = value
    return list(found.values())


def _autocast_state(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _state(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return dict(module.__dict__), {name: dict(module.__dict__[name]) for name in _REGISTRIES}
