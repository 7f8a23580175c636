"""A pattern function as a graph: what its arguments, operations and outputs are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..errors import PartbookError
from .operation import Operation, operation
from .twins import operation_of_module


class PatternError(PartbookError, ValueError):
    """A function that is no pattern. A pattern takes values, calls torch operations on them and returns results.

    Fails::

        def pattern(x):
            return x * 2 if x.sum() > 0 else x      # PatternError: branches on a value

    Works::

        def pattern(x, scale):                      # each argument stands for any one node or constant
            return torch.softmax(x * scale, dim=-1)
    """


class ModuleCall:
    """In a pattern: a call of a module that ``which`` describes, by a glob on its path or by an example."""

    __name__ = "module"

    def __init__(self, which: str | nn.Module) -> None:
        self.which = which

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        proxy = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)), None)
        if proxy is None:
            raise PatternError(f"{self} is called without a value of a pattern: it stands for a call in one")
        return proxy.tracer.create_proxy("call_function", self, args, kwargs)

    def __repr__(self) -> str:
        return f"module({self.which!r})" if isinstance(self.which, str) else type(self.which).__name__


def module(glob: str) -> Callable[..., Any]:
    """In a pattern, the call of a module whose path (from the searched module) matches ``glob``::

        def pattern(x):
            return module("*_proj")(x)

    ``*`` stands for one name, ``**`` for any number of them.
    """
    return ModuleCall(glob)


def matches_glob(path: str, glob: str) -> bool:
    """Whether a dotted path matches: ``*`` is one name, ``**`` any number of them."""
    return _matches(path.split("."), glob.split("."))


def _matches(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(names[i:], pattern[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


@dataclass(frozen=True)
class Pattern:
    """A traced pattern function. Its nodes are those of an fx graph, of which only these are ever looked at."""

    name: str
    # placeholders, in the order of the signature
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    # the outputs that no other output is computed from
    sinks: tuple[fx.Node, ...]
    # None for a call of a module that has no functional twin
    operations: dict[fx.Node, Operation | None]
    # computations on sizes
    sizes: frozenset[fx.Node]

    def users(self, node: fx.Node) -> int:
        """How many operations use ``node``, computations on sizes apart."""
        return sum(user in self.operations and user not in self.sizes for user in node.users)


class _Proxy(fx.Proxy):
    """``x += y`` is the operation in place, which for fx would be ``x + y``."""

    def __iadd__(self, other: Any) -> Any:
        return self.add_(other)

    def __isub__(self, other: Any) -> Any:
        return self.sub_(other)

    def __imul__(self, other: Any) -> Any:
        return self.mul_(other)

    def __itruediv__(self, other: Any) -> Any:
        return self.div_(other)


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ModuleCall(m)(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            raise PatternError("holds a tensor: make it an argument, which matches any value")
        return super().create_arg(a)


def traced(function: Callable[..., Any]) -> Pattern:
    """The pattern that ``function`` describes. Raises PatternError."""
    try:
        if not inspect.isfunction(function):
            raise PatternError(f"is a {type(function).__name__}: write it as a function with def or lambda")
        return _traced(function)
    except PatternError as error:
        raise PatternError(f"pattern {_name(function)}: {error}") from error.__cause__


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))


@cache
def _traced(function: Callable[..., Any]) -> Pattern:
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD):
            raise PatternError(f"the argument {argument}: name each value, so that it has a place among the inputs")
    try:
        graph = _Tracer().trace(function)
    except PatternError:
        raise
    # The function is the user's: it may raise anything.
    except Exception as error:
        hint = "a pattern is a straight line of torch operations, without branches or loops on values"
        raise PatternError(f"cannot be traced: {error} ({hint})") from error
    return _pattern(_name(function), graph)


def _pattern(name: str, graph: fx.Graph) -> Pattern:
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    outputs = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for value in outputs:
        if not isinstance(value, fx.Node) or value.op == "placeholder":
            what = f"its argument {value.name!r}" if isinstance(value, fx.Node) else repr(value)
            raise PatternError(f"returns {what}: return the result of an operation, or a tuple of results")
    if not outputs:
        raise PatternError("returns nothing: return the result of an operation, or a tuple of results")
    if len(set(outputs)) < len(outputs):
        raise PatternError("returns one result twice: return it once")
    needed: dict[fx.Node, None] = dict.fromkeys(outputs)
    for node in (pending := list(outputs)):
        needed.update(dict.fromkeys(node.all_input_nodes))
        pending += [source for source in node.all_input_nodes if source not in pending]
    sizes = size_nodes(graph)
    for output in outputs:
        if output in sizes:
            raise PatternError(f"returns the size {output.format_node()}: a match is made of operations on tensors")
    for node in graph.nodes:
        if node.op == "placeholder" and node not in needed:
            raise PatternError(f"does not use its argument {node.name!r}: leave it out")
        if node.op != "output" and node not in needed and node not in sizes:
            raise PatternError(f"does not use the result of {node.format_node()}: return it, or leave it out")
    inner = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    above = {source for output in outputs for source in _ancestors(output)}
    sinks = tuple(output for output in outputs if output not in above)
    _check_connected(sinks)
    return Pattern(name, inputs, outputs, sinks, {node: _operation(node) for node in inner}, sizes)


def _operation(node: fx.Node) -> Operation | None:
    if not isinstance(node.target, ModuleCall):
        return operation(node.target, node.args, node.kwargs)
    if isinstance(node.target.which, str):
        return None
    return operation_of_module(node.target.which, node.args, node.kwargs, None)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source not in found]
        found.update(new)
        pending += new
    return found


def _check_connected(sinks: tuple[fx.Node, ...]) -> None:
    groups = [({sink} | _ancestors(sink), sink) for sink in sinks]
    reached, _ = groups.pop(0)
    while groups:
        i = next((i for i, (group, _) in enumerate(groups) if group & reached), None)
        if i is None:
            names = ", ".join(str(sink) for _, sink in groups)
            raise PatternError(f"{names} has nothing in common with the other results: find it by a pattern of its own")
        reached = reached | groups.pop(i)[0]


def size_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that hold sizes of tensors, or what was computed from nothing but those."""
    return frozenset(_sizes(graph))


def _sizes(graph: fx.Graph) -> Iterator[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_size = node.meta.get("kind") == "sym" or (node.op == "call_method" and node.target == "size")
        if not is_size and node.op == "call_function":
            sources = node.all_input_nodes
            is_operator = getattr(node.target, "__module__", "") == "_operator"
            computed = is_operator and bool(sources) and found.issuperset(sources)
            is_size = computed or (node.target is getattr and node.args[1] == "shape")
        if is_size:
            found.add(node)
            yield node
