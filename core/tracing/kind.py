"""The kind of call that one graph is good for: how its arguments look, and what the forward's Python relied on."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from ..execution import original_class
from .snapshot import PLAIN, Read
from .symbols import expression

CONSTANTS = (*PLAIN, slice)
# accept(module, given) -> the values of the graph's placeholders, or the reason why the call does not fit
Accept = Callable[[Any, dict[str, Any]], "tuple[Any, ...] | str"]


@dataclass(frozen=True)
class Leaf:
    """One value inside an argument: what became a placeholder, or a constant that the graph holds for."""

    placeholder: str = ""
    constant: Any = None
    is_size: bool = False


@dataclass(frozen=True)
class Argument:
    """One argument of the forward: its (registered) container and what is in it."""

    name: str
    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]


@dataclass
class Conditions:
    """Everything about a call that the recorded Python relied on, apart from the look of the arguments."""

    reads: list[Read] = field(default_factory=list)
    # (condition on sizes, its value, the user's line)
    sizes: list[tuple[Any, Any, str]] = field(default_factory=list)
    # (name of a parameter or buffer, "dtype" or the like, value)
    tensors: list[tuple[str, str, Any]] = field(default_factory=list)
    # it looked at gradients (grad mode, requires_grad), at dtypes, at devices
    gradients: bool = False
    dtypes: bool = False
    devices: bool = False
    parameter: torch.dtype | None = None
    # whether tensors were contiguous
    layouts: bool = False
    # containers of modules that it walked through: path -> names of their children
    containers: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Arranger:
    """Turns the arguments of a call into {name: value}, however they were passed."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._may_make_caches = "use_cache" in self.defaults and self.defaults["use_cache"] is None
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """None where the forward takes no such call; it says so itself when it is run."""
        if len(args) <= len(self._positional):
            given = dict(zip(self._positional, args, strict=False))
        elif self._rest is None:
            return None
        else:
            extra = enumerate(args[len(self._positional) :])
            given = dict(zip(self._positional, args, strict=False)) | {f"{self._rest}_{i}": v for i, v in extra}
        if given.keys() & kwargs.keys():
            return None
        given.update(kwargs)
        return given

    def using_none(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call without the key-value cache that a stack would make and return."""
        makes_one = self._may_make_caches and "use_cache" not in self._positional[: len(args)]
        if "use_cache" in kwargs or makes_one:
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    def asks_for_cache(self, kwargs: dict[str, Any]) -> bool:
        """Whether the call asks a stack to make and return a key-value cache."""
        return self._may_make_caches and kwargs.get("use_cache") is True


def arranger_of(module: nn.Module) -> Arranger:
    return _arranger(cast(Hashable, original_class(module)))


@functools.cache
def _arranger(cls: Any) -> Arranger:
    return Arranger(cls.forward)


def make_accept(
    label: str, arguments: Sequence[Argument], defaults: dict[str, Any], graph: fx.Graph, conditions: Conditions,
    replace: Callable[[Any], Any],
) -> Accept:  # fmt: skip
    """Compile the check of a call to one function: it runs at every step. Raises LookupError for a size condition that
    cannot be computed from the inputs."""
    writer = _Writer(replace)
    writer.arguments(arguments, defaults)
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node.name != "self"]
    writer.shapes(placeholders)
    writer.tensors(placeholders, conditions)
    writer.sizes(conditions)
    writer.reads(conditions)
    values = "".join(f"{node.name}, " for node in placeholders)
    lines = ["def accept(self, given):", *(f"    {line}" for line in writer.lines), f"    return ({values})"]
    exec(compile("\n".join(lines), f"<calls of {label}>", "exec"), writer.names)
    return writer.names["accept"]


class _Writer:
    """The lines of one ``accept`` and the names that they use."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "torch": torch,
            "Tensor": Tensor,
            "math": math,
            "flatten": pytree.tree_flatten,
            "missing": object(),
        }
        self._replace = replace
        self._known: dict[Any, str] = {}
        # the places that sizes are read off
        self._defining: set[str] = set()

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def refuse(self, condition: str, reason: str, *values: str) -> None:
        """Unless ``condition`` is false the call is refused for ``reason``, a text with a %s for each of ``values``."""
        told = self.constant(reason)
        self.lines.append(f"if {condition}: return {told} % ({''.join(f'{value}, ' for value in values)})")

    def arguments(self, arguments: Sequence[Argument], defaults: dict[str, Any]) -> None:
        known = self.constant(frozenset(argument.name for argument in arguments))
        self.lines += [
            f"for name in given.keys() - {known}:",
            "    if given[name] is not None:",
            "        return 'the argument %r was absent, now it is a %s' % (name, type(given[name]).__name__)",
        ]
        for i, argument in enumerate(arguments):
            default = self.constant(defaults.get(argument.name))
            self.lines.append(f"a{i} = given.get({argument.name!r}, {default})")
            self._value(f"a{i}", argument)

    def _value(self, value: str, argument: Argument) -> None:
        kind, count, name = argument.spec.type, len(argument.leaves), _literal(argument.name)
        if argument.spec.is_leaf():
            self._leaf(value, argument.leaves[0], argument.name)
        elif kind in (tuple, list) and all(child.is_leaf() for child in argument.spec.children()):
            container = self.constant(kind)
            what = f"the argument {name} was a {kind.__name__} of {count}"
            self.refuse(f"type({value}) is not {container} or len({value}) != {count}", what)
            for i, leaf in enumerate(argument.leaves):
                self.lines.append(f"{value}_{i} = {value}[{i}]")
                self._leaf(f"{value}_{i}", leaf, f"{argument.name}[{i}]")
        else:
            spec = self.constant(argument.spec)
            self.lines.append(f"{value}_leaves, {value}_spec = flatten({value})")
            self.refuse(f"{value}_spec != {spec}", f"the structure of the argument {name} was another one")
            for i, leaf in enumerate(argument.leaves):
                self.lines.append(f"{value}_{i} = {value}_leaves[{i}]")
                self._leaf(f"{value}_{i}", leaf, f"{argument.name} (item {i})")

    def _leaf(self, value: str, leaf: Leaf, name: str) -> None:
        if leaf.is_size:
            self.refuse(f"type({value}) is not int", f"the argument {_literal(name)} was an int, now it is %r", value)
            self.lines.append(f"{leaf.placeholder} = {value}")
        elif leaf.placeholder:
            found = f"the argument {_literal(name)} was a tensor, now it is %r"
            self.refuse(f"not isinstance({value}, Tensor)", found, value)
            self.lines.append(f"{leaf.placeholder} = {value}")
        else:
            if leaf.constant is None:
                found = f"the argument {_literal(name)} was None, now it is a %s"
                self.refuse(f"{value} is not None", found, f"type({value}).__name__")
                return
            constant = self.constant(leaf.constant)
            found = f"the argument {_literal(name)} was {_literal(leaf.constant)}, now it is a %s"
            unequal = f"type({value}) is not type({constant}) or {value} != {constant}"
            self.refuse(f"{value} is not {constant} and ({unequal})", found, f"type({value}).__name__")

    def shapes(self, placeholders: Sequence[fx.Node]) -> None:
        dims = [(node, [*self._dims(node)]) for node in placeholders]
        for node, sizes in dims:
            if "val" in node.meta:
                what = f"{node.name!r} had {len(sizes)} dims, now its shape is %s"
                self.refuse(f"{node.name}.dim() != {len(sizes)}", what, f"tuple({node.name}.shape)")
        # sizes that are symbols by themselves first: the others are made of them
        for only_symbols in (True, False):
            for _, sizes in dims:
                for place, size in sizes:
                    if not (size.is_number or size in self._known) and size.is_Symbol is only_symbols:
                        self._known[size] = f"size{len(self._known)}"
                        self.lines.append(f"{self._known[size]} = {place}")
                        self._defining.add(place)
        for node, sizes in dims:
            for place, size in sizes:
                if place in self._defining:
                    continue
                wanted = str(size) if size.is_number else self._known[size]
                shape = f"tuple({node.name}.shape)" if "val" in node.meta else node.name
                self.refuse(f"{place} != {wanted}", f"{place} must be %s, but {node.name!r} is %s", wanted, shape)
        self._identities([node for node in placeholders if "val" in node.meta])

    def _identities(self, tensors: Sequence[fx.Node]) -> None:
        """Python may have asked which arguments are one tensor, and a write through one name shows in the other."""
        for i, node in enumerate(tensors):
            first = node.meta.get("same_as")
            if first is not None:
                self.refuse(f"{node.name} is not {first}", f"{first!r} and {node.name!r} were one tensor")
                continue
            others = [other.name for other in tensors[:i] if "same_as" not in other.meta]
            if others:
                same = " or ".join(f"{node.name} is {other}" for other in others)
                self.refuse(same, f"{node.name!r} was another tensor than {' and '.join(map(repr, others))}")

    def _dims(self, node: fx.Node) -> Iterator[tuple[str, Any]]:
        if "val" in node.meta:
            for dim, size in enumerate(node.meta["val"].shape):
                yield f"{node.name}.shape[{dim}]", self._replace(expression(size))
        else:
            yield node.name, self._replace(node.meta["size"])

    def tensors(self, placeholders: Sequence[fx.Node], conditions: Conditions) -> None:
        tensors = [node for node in placeholders if "val" in node.meta]
        for node in tensors:
            value, name = node.meta["val"], node.name
            if conditions.dtypes:
                self.refuse(
                    f"{name}.dtype is not {value.dtype}", f"{name!r} was {value.dtype}, now %s", f"{name}.dtype"
                )
            if conditions.devices and value.device.type != "meta":
                was = value.device.type
                self.refuse(f"{name}.device.type != {was!r}", f"{name!r} was on {was}, now on %s", f"{name}.device")
            if conditions.layouts:
                was = bool(value.is_contiguous())
                self.refuse(f"{name}.is_contiguous() is not {was}", f"{name!r} had is_contiguous()={was}")
            if conditions.gradients:
                needed = node.meta["requires_grad"]
                self.refuse(f"{name}.requires_grad is not {needed}", f"{name!r} had requires_grad={needed}")
                is_leaf = node.meta["is_leaf"]
                self.refuse(f"{name}.is_leaf is not {is_leaf}", f"{name!r} had is_leaf={is_leaf}")
        if conditions.gradients:
            mode = torch.is_grad_enabled()
            self.refuse(f"torch.is_grad_enabled() is not {mode}", f"gradients were {'on' if mode else 'off'}")
        if conditions.dtypes and conditions.parameter is not None:
            self.names["first_dtype"] = first_dtype
            was = conditions.parameter
            self.refuse(f"first_dtype(self) is not {was}", f"its parameters were {was}, now %s", "first_dtype(self)")
        for path, names in conditions.containers.items():
            children = f"tuple({_attribute(path)}._modules)"
            self.refuse(f"{children} != {names}", f"{path!r} had {len(names)} modules, now %s", children)
        self._autocast(next((node.meta["val"].device.type for node in tensors), "cpu"))
        for name, attribute, value in conditions.tensors:
            place, constant = f"{_attribute(name)}.{attribute}", self.constant(value)
            self.refuse(f"{place} != {constant}", f"{name}.{attribute} was {_literal(value)}, now it is %s", place)

    def _autocast(self, device: str) -> None:
        if device == "meta":
            return
        self.names["autocast_state"] = autocast_state
        state, now = autocast_state(device), f"autocast_state({device!r})"
        self.refuse(f"{now} is not {state}", f"the dtype of autocast was {state}, now it is %s", now)

    def sizes(self, conditions: Conditions) -> None:
        seen = set()
        for condition, value, where in conditions.sizes:
            condition = self._replace(condition)
            if not getattr(condition, "free_symbols", None) or (condition, value) in seen:
                continue
            seen.add((condition, value))
            text = self._text(condition)
            if text is None:
                raise LookupError(f"Python branches on {condition}, which is no size of its inputs, at {where}")
            what = f"the graph depends on the size condition {condition} being {value}, at {where}"
            # no comparison of truth values: while another model is traced they are symbols
            differs = {True: f"not ({text})", False: text}.get(value, f"({text}) != ({value})")
            self.refuse(differs, what.replace("%", "%%"))

    def _text(self, condition: Any) -> str | None:
        names = {size: sympy.Symbol(name, integer=True) for size, name in self._known.items()}
        named = condition.xreplace(names)
        return None if named.free_symbols - set(names.values()) else PythonPrinter().doprint(named)

    def reads(self, conditions: Conditions) -> None:
        for read in conditions.reads:
            owner = _attribute(read.path) if read.path else "self"
            self.lines.append(f"r = {owner}.__dict__.get({read.name!r}, missing)")
            if read.of_class:
                self.lines[-1] = f"r = getattr({owner}, {read.name!r}, missing)"
            kept, what = self.constant(read.value), f"the attribute {read} was {_literal(str(read.value))}"
            if isinstance(read.value.content, PLAIN):
                # most attributes are the very object that was read
                constant = self.constant(read.value.content)
                self.refuse(f"r is not {constant} and not {kept}.holds(r)", f"{what}, now it is %r", "r")
            else:
                self.refuse(f"not {kept}.holds(r)", f"{what}, which has changed")


def _literal(value: Any) -> str:
    return (value if isinstance(value, str) else repr(value)).replace("%", "%%")


def first_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's first parameter: a model that is converted is converted as a whole."""
    return next((parameter.dtype for parameter in module.parameters()), None)


def autocast_state(device: str) -> torch.dtype | None:
    """The dtype that autocast gives on this device type, None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _attribute(path: str) -> str:
    text = "self"
    for name in path.split("."):
        text = f"{text}.{name}" if name.isidentifier() else f"getattr({text}, {name!r})"
    return text
