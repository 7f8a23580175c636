"""Python values that a traced forward read from its modules: kept, compared at every later call."""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_CONTAINERS = (tuple, list, set, frozenset, dict)


@dataclass(frozen=True)
class Snapshot:
    """A value as it was; ``holds`` asks whether another one is still the same.

    Containers are compared item by item, other objects (a configuration) by type and attributes, so a copy of the
    model fits as well. Modules and tensors are not snapshots' business: their calls and reads are in the graph.
    """

    kind: type
    content: Any
    # the content are the attributes of an object
    of_attributes: bool = False
    # attributes that were None until the forward gave them a value: either is the same
    defaults: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(value: Any) -> Snapshot:
        if isinstance(value, PLAIN):
            return Snapshot(type(value), value)
        if isinstance(value, _CONTAINERS):
            return Snapshot(type(value), type(value)(value) if type(value) in _CONTAINERS else value)
        if hasattr(value, "__dict__"):
            return Snapshot(type(value), dict(_attributes(value)), of_attributes=True)
        return Snapshot(type(value), value)

    def holds(self, value: Any) -> bool:
        if value is self.content:
            return True
        if type(value) is not self.kind:
            return False
        if not self.of_attributes:
            return _equal(value, self.content)
        if not self.defaults:
            return _equal(_attributes(value), self.content)
        content = dict(_attributes(value))
        for name, default in self.defaults:
            if content.get(name) == default:
                content[name] = None
        return _equal(content, self.content)

    def settled(self, value: Any) -> Snapshot:
        """With what the forward has set on an object that had not been set before (a configuration's problem type)."""
        if not self.of_attributes:
            return self
        unset = {name for name, content in self.content.items() if content is None}
        found = _attributes(value).items()
        defaults = tuple((name, v) for name, v in found if name in unset and isinstance(v, PLAIN) and v is not None)
        return replace(self, defaults=defaults)

    def __str__(self) -> str:
        return repr(self.content) if isinstance(self.content, PLAIN) else f"this {self.kind.__name__}"


def _attributes(value: Any) -> dict[str, Any]:
    # Past a __getattribute__ of its own, which costs more than the comparison: this runs at every call.
    return object.__getattribute__(value, "__dict__")


@dataclass(frozen=True)
class Read:
    """One attribute that a forward read: of the traced module (path "") or of a module below it."""

    path: str
    name: str
    value: Snapshot
    # an attribute of the class, which a module may have of its own later
    of_class: bool = False

    def holds(self, module: nn.Module) -> bool:
        try:
            owner = module.get_submodule(self.path)
            value = getattr(owner, self.name) if self.of_class else vars(owner)[self.name]
        except (AttributeError, KeyError):
            return False
        return self.value.holds(value)

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        # tensors inside, which do not compare to one truth value
        return False
