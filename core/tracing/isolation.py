"""A model that a run on fake tensors leaves as it was: attributes, buffers, random streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..rng import get_streams, set_streams

_REGISTRIES = ("_parameters", "_buffers", "_modules")
# transformers installs its hooks for intermediate outputs on the first call: a later run would install them again
_KEPT = "_output_capturing_hooks_installed"


class Untouched:
    """Inside, the modules of ``model`` may change; afterwards each has the attributes that it had before.

    Buffers are copies inside: a write whose operands are all real really happens, even on fake tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())

    def __enter__(self) -> None:
        self._streams = get_streams()
        self._autocast_cache = torch.is_autocast_cache_enabled()
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

    def __exit__(self, *error: object) -> None:
        for module, (attributes, registries) in zip(self._modules, self._before, strict=True):
            installed = module.__dict__.get(_KEPT)
            for name, content in registries.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            if installed:
                module.__dict__[_KEPT] = installed
        torch.set_autocast_cache_enabled(self._autocast_cache)
        set_streams(self._streams)


def _state(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return dict(module.__dict__), {name: dict(module.__dict__[name]) for name in _REGISTRIES}
