"""Values in a graph that depend on nothing but sizes, computed for the sizes at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes


class _Varies(Exception):
    """It depends on inputs, parameters or random numbers."""


def ask(node: fx.Node, hint: Callable[[Any], int], question: Callable[[Tensor], bool]) -> bool | None:
    """``question`` of the value of ``node`` at the sizes of ``hint``; None where it depends on more than sizes."""
    known: dict[fx.Node, Any] = {}

    def compute(node: fx.Node) -> Any:
        if node not in known:
            known[node] = _compute(node, compute, hint)
        return known[node]

    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return question(compute(node))
    except _Varies:
        return None


def _compute(node: fx.Node, compute: Callable[[fx.Node], Any], hint: Callable[[Any], int]) -> Any:
    if node.meta.get("kind") == "sym" and "size" in node.meta:
        return int(hint(node.meta["size"]))
    if node.meta.get("kind") == "device":
        return torch.device("cpu")
    if node.op in ("placeholder", "get_attr", "call_module") or node.meta.get("random"):
        raise _Varies
    args, kwargs = fx.node.map_arg(node.args, compute), fx.node.map_arg(node.kwargs, compute)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
