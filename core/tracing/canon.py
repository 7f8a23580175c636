"""How a called torch function appears in a graph: under the target that ``fx.symbolic_trace`` would give it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "__add__": operator.add,
    "__radd__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__rmul__": operator.mul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__pow__": operator.pow,
    "__matmul__": operator.matmul,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__getitem__": operator.getitem,
}
_REFLECTED: dict[str, Callable[..., Any]] = {
    "__rsub__": operator.sub,
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rmod__": operator.mod,
    "__rpow__": operator.pow,
    "__rmatmul__": operator.matmul,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "__neg__": operator.neg,
    "__invert__": operator.invert,
    "__pos__": operator.pos,
}
# Written out, because an operator on the right-hand side of an assignment would rebind the name in generated code.
_AUGMENTED = {
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__idiv__": "div_",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
}


# Functions of Tensor that stand for an operator, some under the name of what they wrap.
_OPERATORS = {
    getattr(torch.Tensor, name): name
    for name in (*_BINARY, *_REFLECTED, *_UNARY, *_AUGMENTED)
    if name.startswith("__") and hasattr(torch.Tensor, name)
}


def setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    """``x[index] = value``, returning x so that what reads it later depends on the assignment."""
    x[index] = value
    return x


def property_name(function: Any) -> str | None:
    """``"shape"`` for the getter or setter of ``Tensor.shape``; None for anything that is no property."""
    if getattr(function, "__name__", None) in ("__get__", "__set__", "__delete__"):
        return getattr(function.__self__, "__name__", None)
    return None


def canonical(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any, Any, Any]:
    """(op, target, args, kwargs) of the node for one call of ``function``."""
    name = _OPERATORS.get(function) or getattr(function, "__name__", None)
    if name is None or not (function in _OPERATORS or _is_method(function)):
        return "call_function", function, args, kwargs
    if name == "__setitem__":
        return "call_function", setitem, args, kwargs
    if not kwargs and len(args) == 2 and name in _BINARY:
        return "call_function", _BINARY[name], args, {}
    if not kwargs and len(args) == 2 and name in _REFLECTED:
        return "call_function", _REFLECTED[name], args[::-1], {}
    if not kwargs and len(args) == 1 and name in _UNARY:
        return "call_function", _UNARY[name], args, {}
    return "call_method", _AUGMENTED.get(name, name), args, kwargs


def _is_method(function: Any) -> bool:
    owner = getattr(function, "__objclass__", None)
    if owner is not None:
        return issubclass(torch.Tensor, owner)
    return getattr(torch.Tensor, function.__name__, None) is function
