"""Graphs that were recorded before, for modules that are alike: identical blocks of a model are traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..execution import original_class, plan_of

if TYPE_CHECKING:
    from .traced import Kind


@dataclass
class Library:
    """The graphs of one model's modules as recorded, by what the modules look like."""

    _shelves: dict[Any, list[Kind]] = field(default_factory=dict)

    def add(self, module: nn.Module, leaves: tuple[Callable[..., Any], ...], kinds: list[Kind]) -> None:
        self._shelves.setdefault((appearance(module), leaves), []).extend(kinds)

    def find(self, module: nn.Module, leaves: tuple[Callable[..., Any], ...]) -> list[Kind]:
        """The graphs that hold for ``module``, as far as its looks and its attributes tell."""
        return [kind for kind in self._shelves.get((appearance(module), leaves), ()) if kind.holds_for(module)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Library:
        return self


def appearance(module: nn.Module) -> tuple[Any, ...]:
    """Everything about a module and those below it that its graph may depend on, but for attributes that it reads."""
    first: dict[int, int] = {}
    return tuple(_one(path, below, first) for path, below in module.named_modules(remove_duplicate=False))


def _one(path: str, module: nn.Module, first: dict[int, int]) -> tuple[Any, ...]:
    return (
        path,
        original_class(module),
        first.setdefault(id(module), len(first)),
        *_tensors(module, first),
        _plan(module),
    )


def _tensors(module: nn.Module, first: dict[int, int]) -> Iterator[Any]:
    for registry in (module._parameters, module._buffers):
        for name, tensor in registry.items():
            if tensor is None:
                yield name
            else:
                # a tied tensor has the number of its first place
                number = first.setdefault(id(tensor), len(first))
                yield name, number, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def _plan(module: nn.Module) -> Any:
    """How a scheduled module's output differs from that of its own forward; hooks may change it as well."""
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    plan = plan_of(module)
    if plan is None:
        return hooks, None, (), False, False
    syncs = tuple((sync.mode, sync.op, sync.argument) for sync in plan.syncs)
    return hooks, plan.kernel and type(plan.kernel), syncs, plan.deferred_bias, plan.decomposed
