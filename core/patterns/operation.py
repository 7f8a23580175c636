"""One form for every torch call, however it is spelt: the name of the operation and its arguments by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn import functional


@dataclass(frozen=True)
class Attribute:
    """A parameter, buffer or training flag that a call of a module reads, for which the graph has no node.

    ``path`` is dotted and relative to the traced module: ``"c_fc.weight"``, ``"dropout.training"``.
    """

    path: str


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


# Stands where only one of two calls gives an argument, and gives something else than its default.
MISSING = _Missing()


@dataclass(frozen=True)
class Operation:
    """A call: ``name`` is one for all spellings, or the callable itself where it is none of torch's operations.

    ``arguments`` also has those that were left at their default, for which ``defaults`` has the value.
    """

    name: Any
    arguments: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def facing(self, other: Operation) -> Iterator[tuple[str, Any, Any]]:
        """(name, own value, the other's value) of the arguments that must agree for the two calls to be one."""
        for name, value in self.arguments.items():
            if name in other.arguments:
                yield name, value, other.arguments[name]
            elif not self._is_default(name):
                yield name, value, MISSING
        for name, value in other.arguments.items():
            if name not in self.arguments and not other._is_default(name):
                yield name, MISSING, value

    def is_commutative(self) -> bool:
        plain = all(equal_literals(value, 1) for name, value in self.arguments.items() if name == "alpha")
        return self.name in _COMMUTATIVE and plain and {"input", "other"} <= set(self.arguments)

    def swapped(self) -> Operation:
        swapped = {"input": self.arguments["other"], "other": self.arguments["input"]}
        return Operation(self.name, {**self.arguments, **swapped}, self.defaults)

    def _is_default(self, name: str) -> bool:
        return name in self.defaults and equal_literals(self.arguments[name], self.defaults[name])


_COMMUTATIVE = frozenset(
    ("add", "mul", "eq", "ne", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor",
     "logical_and", "logical_or", "logical_xor")
)  # fmt: skip
_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}
_NAMESPACES = (torch, functional, torch._C._nn, Tensor)
# The schemas of torch and the Python functions do not agree on every name.
_RENAMED = {
    "self": "input",
    "tensor": "input",
    "train": "training",
    "split_size_or_sections": "split_size",
    "split_sizes": "split_size",
}
# Methods that take a sequence also as separate arguments: the name of the sequence.
_SEQUENCES = {
    "view": "size",
    "reshape": "shape",
    "permute": "dims",
    "expand": "size",
    "repeat": "repeats",
    "flip": "dims",
    "tile": "dims",
}


def common_name(target: Any) -> Any:
    """One name for the method, the function and the operator of an operation; any other callable is its own name."""
    if isinstance(target, str):
        return _ALIASES.get(target, target)
    # An object that is called need not be hashable, a function is.
    return _name_of_function(target) if hasattr(target, "__name__") else target


@cache
def _name_of_function(function: Callable[..., Any]) -> Any:
    name = function.__name__
    known = getattr(operator, name, None) is function or any(
        getattr(space, name, None) is function for space in _NAMESPACES
    )
    return _ALIASES.get(name, name) if known else function


def operation(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operation:
    """The call of a function, or of the method ``target`` (text) of the first argument."""
    name = common_name(target)
    args = tuple(args)
    if name in _SEQUENCES and len(args) > 2:
        args = (args[0], args[1:])
    elif name == "getitem" and type(args[1]) is int and (sized := _sized(args[0])) is not None:
        return operation("size", (sized, args[1]), {})
    elif target is getattr and args[1:] == ("shape",):
        return operation("size", args[:1], {})
    bound = _bind_best(_signatures(target), args, kwargs)
    if bound is None:
        return Operation(name, {**{str(i): value for i, value in enumerate(args)}, **kwargs}, {})
    if not isinstance(name, str):
        return Operation(name, *bound)
    arguments, defaults = (
        {_RENAMED.get(key, key): _alone(name, key, value) for key, value in values.items() if key[0] != "_"}
        for values in bound
    )
    return Operation(name, arguments, defaults)


def _sized(value: Any) -> Any:
    """x, where ``value`` is ``x.shape`` or ``x.size()``."""
    if not isinstance(value, fx.Node) or value.kwargs or not value.args:
        return None
    is_shape = value.target is getattr and value.args[1] == "shape"
    is_size = value.op == "call_method" and value.target == "size" and len(value.args) == 1
    return value.args[0] if is_shape or is_size else None


def _alone(name: str, key: str, value: Any) -> Any:
    """view((6,)) is view(6), and sum(dim=(0,)) is sum(dim=0)."""
    takes_one = key == "dim" or key == _SEQUENCES.get(name)
    return value[0] if takes_one and isinstance(value, tuple | list) and len(value) == 1 else value


def _bind_best(
    signatures: Sequence[Signature], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Bound to the first overload whose types fit, to the first that takes as many arguments where none does."""
    first = None
    for signature in signatures:
        bound = signature.bind(args, kwargs)
        if bound is None:
            continue
        first = first or (bound, signature.defaults)
        if all(_fits(bound[key], annotation) for key, annotation in signature.checked if key in bound):
            return bound, signature.defaults
    return first


class Signature:
    """What a function takes; ``inspect.Signature.bind`` would be most of the time of a search."""

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters
        kinds = {kind: [key for key, p in parameters.items() if p.kind is kind] for kind in inspect._ParameterKind}
        self._positional = kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._more_args = kinds[inspect.Parameter.VAR_POSITIONAL]
        self._more_kwargs = bool(kinds[inspect.Parameter.VAR_KEYWORD])
        self._named = {*self._positional, *kinds[inspect.Parameter.KEYWORD_ONLY]}
        self.defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
        self._required = self._named - self.defaults.keys()
        self.checked = [(key, p.annotation) for key, p in parameters.items() if p.annotation in (bool, int, Tensor)]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name, defaults included; None where the function takes no such call."""
        given = dict(zip(self._positional, args, strict=False))
        if len(args) > len(given):
            if not self._more_args:
                return None
            given[self._more_args[0]] = tuple(args[len(given) :])
        if given.keys() & kwargs.keys() or not (self._more_kwargs or self._named >= kwargs.keys()):
            return None
        given.update(kwargs)
        return self.defaults | given if given.keys() >= self._required else None


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a constant can be what an overload says; what a node will be is not known here."""
    if annotation is bool:
        return isinstance(value, bool | fx.Node)
    if annotation is int:
        return not isinstance(value, bool | float | str | tuple | list)
    if annotation is Tensor:
        return not isinstance(value, bool | int | float | str | tuple | list | torch.dtype | torch.device)
    return True


@cache
def _signatures(target: Any) -> tuple[Signature, ...]:
    name = common_name(target)
    if inspect.isfunction(target):
        return (Signature(inspect.signature(target)),)
    packet = getattr(torch.ops.aten, name, None) if isinstance(name, str) else None
    if packet is not None:
        # some names have overloads for Python's numbers, lists and text as well
        return tuple(Signature(each) for each in get_signature_for_torch_op(packet) or () if "Tensor" in str(each))
    if not callable(target):
        return ()
    try:
        return (Signature(inspect.signature(target)),)
    except ValueError:
        return ()


def equal_literals(a: Any, b: Any) -> bool:
    """Equal constants: 1 is 1.0 and not True, a list is a tuple."""
    if isinstance(a, tuple | list):
        same = isinstance(b, tuple | list) and len(a) == len(b)
        return same and all(map(equal_literals, a, b))
    if isinstance(a, slice):
        return isinstance(b, slice) and equal_literals((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and bool(a == b)
