"""What a primitive is: a frozen record that checks first, then changes one node of a schedule."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from .errors import Problem, did_you_mean
from .match import Match
from .mesh import Mesh
from .tracing.examples import TensorLike
from .weights import Cat, Expression, Source, Transpose

if TYPE_CHECKING:
    from .state import State

VERBS: dict[str, type[Primitive]] = {}


@dataclass(frozen=True)
class Primitive(ABC):
    """One named transformation of a schedule node; its fields are its arguments.

    A subclass sets ``verb`` and writes ``check`` and ``apply``; being applied, printed, saved and replayed come from
    here. A user's own works like a built-in one: ``sch["mlp"].do(MyPrimitive(...))``.
    """

    verb: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = VERBS.get(cls.verb)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"the verb {cls.verb!r} of {cls.__qualname__} belongs to {known.__module__}.{known.__name__}"
            )
        VERBS[cls.verb] = cls

    @abstractmethod
    def check(self, site: Site) -> Iterator[Problem]:
        """Every broken rule; touches nothing."""

    @abstractmethod
    def apply(self, site: Site) -> None:
        """Make the change. Called after a clean check only, so it cannot fail for a reason of the user's."""

    def touches(self, site: Site) -> Iterator[str]:
        """The paths of the modules whose output or forward it changes: graphs that hold them are made again."""
        yield site.path

    def as_call(self) -> str:
        """The call as the user would write it, without arguments at their defaults."""
        arguments = [
            f"{field.name}={_show(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        ]
        return f"{self.verb}({', '.join(arguments)})"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values. Raises ValueError for what cannot be saved, naming the argument."""
        return {field.name: _encode(getattr(self, field.name), self, field.name) for field in dataclasses.fields(self)}

    @staticmethod
    def from_json(verb: str, arguments: dict[str, Any]) -> Primitive:
        if verb not in VERBS:
            raise ValueError(
                f"no primitive {verb!r}; {did_you_mean(verb, VERBS)} (is the module that defines it imported?)"
            )
        return VERBS[verb](**{name: _decode(value) for name, value in arguments.items()})


@dataclass(frozen=True)
class Site:
    """Where a primitive acts: one module of the scheduled model, and what is known about the whole."""

    state: State
    path: str

    @property
    def module(self) -> nn.Module:
        return self.state.model.get_submodule(self.path)

    @property
    def mesh(self) -> Mesh:
        return self.state.mesh

    def full_name(self, name: str) -> str:
        """The canonical name of this module's own parameter: the first of its names where it is tied."""
        return self.state.canonical(self.module._parameters[name])

    def missing_parameter(self, name: str) -> Iterator[Problem]:
        """The problem of a module that has no parameter ``name`` of its own."""
        own = [key for key, value in self.module._parameters.items() if value is not None]
        if name not in own:
            yield Problem(f"{type(self.module).__name__} has no parameter {name!r}", did_you_mean(name, own))


def _show(value: Any) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if isinstance(value, Source):
        return repr(value.name)
    if isinstance(value, Cat):
        return f"cat([{', '.join(map(_show, value.parts))}], dim={value.dim})"
    if isinstance(value, Transpose):
        return f"transpose({_show(value.part)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_show(item)}" for key, item in value.items()) + "}"
    return repr(value)


_EXPRESSIONS: dict[str, type[Expression]] = {"source": Source, "cat": Cat, "transpose": Transpose}


def _encode(value: Any, primitive: Primitive, argument: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TensorLike):
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, list | tuple):
        items = [_encode(item, primitive, argument) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        # Pairs: JSON would turn a key that is a number into text.
        return {"dict": [[_encode(part, primitive, argument) for part in pair] for pair in value.items()]}
    if isinstance(value, Match):
        return {"match": _encode([value.path, value.nodes, value.pattern], primitive, argument)}
    for name, cls in _EXPRESSIONS.items():
        if isinstance(value, cls):
            fields = dataclasses.fields(value)  # type: ignore[arg-type]
            return {name: {field.name: _encode(getattr(value, field.name), primitive, argument) for field in fields}}
    if callable(value) and not isinstance(value, nn.Module):
        return {"function": _importable_name(value, primitive, argument)}
    raise ValueError(
        f"{primitive.as_call()}: {argument} is a {type(value).__name__}, which cannot be saved as text\n"
        "  hint: pass a function that can be imported and that makes it"
    )


def _importable_name(value: Callable[..., Any], primitive: Primitive, argument: str) -> str:
    name = f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', '?')}"
    try:
        found = _decode({"function": name})
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not value:
        raise ValueError(
            f"{primitive.as_call()}: {argument} is {name}, which cannot be imported by that name, "
            "so it cannot be saved\n"
            "  hint: define it at the top level of a module"
        )
    return name


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tuple":
        return tuple(_decode(item) for item in content)
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content}
    if kind == "function":
        module, _, qualified = content.partition(":")
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
        return found
    if kind == "match":
        return Match(*_decode(content))
    if kind == "tensor":
        return TensorLike(tuple(content[0]), getattr(torch, content[1]))
    return _EXPRESSIONS[kind](**{name: _decode(item) for name, item in content.items()})
