"""Values of a graph, for the search: what is equal to what, and how a message shows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .operation import Attribute


def facing_parts(wanted: Any, value: Any) -> list[tuple[Any, Any]] | None:
    """What faces what in two containers of one form."""
    if isinstance(wanted, slice) and isinstance(value, slice):
        return [(wanted.start, value.start), (wanted.stop, value.stop), (wanted.step, value.step)]
    if isinstance(wanted, tuple | list) and isinstance(value, tuple | list) and len(wanted) == len(value):
        return list(zip(wanted, value, strict=True))
    if isinstance(wanted, dict) and isinstance(value, dict) and wanted.keys() == value.keys():
        return [(wanted[key], value[key]) for key in wanted]
    return None


def path_of(value: fx.Node | Attribute) -> str | None:
    """The path of the parameter or buffer that a value of the graph is."""
    if isinstance(value, Attribute):
        return value.path
    return str(value.target) if value.op == "get_attr" else None


def same_size(known: Any, value: Any) -> bool:
    """Whether a size that was computed is what the graph has, as a constant or as a node that holds a size."""
    if isinstance(known, tuple):
        return isinstance(value, tuple | list) and len(known) == len(value) and all(map(same_size, known, value))
    return bool(_expression(known) == _expression(value))


def _expression(size: Any) -> Any:
    if isinstance(size, fx.Node):
        size = size.meta.get("size", size.meta.get("val"))
    return size.node.expr if isinstance(size, torch.SymInt) else size


def show(value: Any) -> str:
    """A value of a graph in a message."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    return value.path if isinstance(value, Attribute) else repr(value)


def show_place(node: fx.Node) -> str:
    """A node in a message that is about it, with the user's line."""
    where = node.meta.get("where")
    return f"%{node.name} (at {where})" if where else f"%{node.name}"
