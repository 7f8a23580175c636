"""Rewrites of graphs at a match: fused, recomputed, replaced. Each is repeated on every graph that its module gets."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..collectives import pretended
from ..errors import Problem
from ..match import Place
from ..patterns import Attribute, Found
from .fused import Compiler, checkpoint_problems, checkpointed, compiled, fuse_problems, grouped, label_of
from .modes import Spy
from .region import carve, problems_of
from .region import parameter as parameter_node
from .traced import RewriteError


@dataclass(frozen=True)
class AtMatch(ABC):
    """A rewrite at one place; ``call`` is the user's, for errors."""

    place: Place
    call: str

    def __str__(self) -> str:
        return self.call

    @property
    @abstractmethod
    def summary(self) -> str:
        """What the graph has now, in few words."""

    def __call__(self, graph: fx.Graph, module: nn.Module) -> Sequence[str]:
        """Rewrite in place; gives the children of whose settings the graph depends from now on. Raises RewriteError."""
        found = self.place.locate(graph, module)
        if found is None and self.is_needed():
            raise RewriteError([Problem(f"a kind of call has no match of {self.place.match}")])
        if found is None:
            return ()
        problems = list(self.problems(graph, found, module))
        if problems:
            raise RewriteError(problems)
        relied = [attribute.path.rpartition(".")[0] for attribute, _ in found.modes]
        relied += self.takes_over(found)
        self.rewrite(graph, found, module)
        return relied

    def is_needed(self) -> bool:
        """Whether every graph must have the place; else one without it is right, only not faster."""
        return False

    def takes_over(self, found: Found) -> list[str]:
        """The children whose calls go away with the match."""
        return []

    @abstractmethod
    def problems(self, graph: fx.Graph, found: Found, module: nn.Module) -> Sequence[Problem]: ...

    @abstractmethod
    def rewrite(self, graph: fx.Graph, found: Found, module: nn.Module) -> None: ...


@dataclass(frozen=True)
class FuseAt(AtMatch):
    compiler: Compiler

    @property
    def summary(self) -> str:
        return f"{self.place.match.title} fused" + (f" by {self.compiler}" if self.compiler else "")

    def problems(self, graph: fx.Graph, found: Found, module: nn.Module) -> Sequence[Problem]:
        return list(fuse_problems(graph, found.nodes, found.outputs, module, self.compiler))

    def rewrite(self, graph: fx.Graph, found: Found, module: nn.Module) -> None:
        label, path = label_of(found.nodes), self.place.match.path
        if self.compiler is None:
            carve(graph, found.nodes, found.outputs, grouped(label, path))
        else:
            carve(graph, found.nodes, found.outputs, compiled(label, module, self.compiler, path))


@dataclass(frozen=True)
class CheckpointAt(AtMatch):
    @property
    def summary(self) -> str:
        return f"{self.place.match.title} recomputed"

    def problems(self, graph: fx.Graph, found: Found, module: nn.Module) -> Sequence[Problem]:
        return list(checkpoint_problems(graph, found.nodes, found.outputs))

    def rewrite(self, graph: fx.Graph, found: Found, module: nn.Module) -> None:
        label = label_of(found.nodes, "recomputed")
        carve(graph, found.nodes, found.outputs, checkpointed(label, self.place.match.path))


@dataclass(frozen=True)
class ReplaceAt(AtMatch):
    """The call of ``new`` in the place of the match: a function, or (``name``) a child of the module."""

    new: Callable[..., Any]
    name: str | None

    @property
    def summary(self) -> str:
        return f"{self.place.match.title} by {self.name or _name(self.new)}"

    def takes_over(self, found: Found) -> list[str]:
        return [str(node.target) for node in found.nodes if node.op == "call_module"]

    def is_needed(self) -> bool:
        # weights have moved: what is not replaced would have none
        return self.name is not None

    def problems(self, graph: fx.Graph, found: Found, module: nn.Module) -> Sequence[Problem]:
        return list(problems_of(graph, found.nodes, found.outputs))

    def rewrite(self, graph: fx.Graph, found: Found, module: nn.Module) -> None:
        result, random = self._trial(found, module)
        # Carved out first: that moves what has to run before or after.
        call = carve(graph, found.nodes, found.outputs, grouped("replaced"))
        args = pytree.tree_map(lambda x: parameter_node(graph, x.path) if isinstance(x, Attribute) else x, found.inputs)
        with graph.inserting_before(call):
            new = graph.call_module(self.name, args) if self.name else graph.call_function(self.new, args)
        new.meta = {**call.meta, "random": random, "mutates": []}
        if len(found.outputs) > 1 and not isinstance(result, tuple | list):
            with graph.inserting_before(call):
                parts = graph.call_function(split_parts, (new, tuple(node_width(node) for node in found.outputs)))
            new.meta, parts.meta = {"val": result, "where": call.meta["where"]}, new.meta
            new = parts
        call.replace_all_uses_with(new)
        graph.erase_node(call)

    def _trial(self, found: Found, module: nn.Module) -> tuple[Any, bool]:
        """Run ``new`` on fake tensors: its outputs must look like those of the match. Gives them, and whether it draws
        random numbers."""

        new = module.get_submodule(self.name) if self.name else self.new
        mode = next(node.meta["val"].fake_mode for node in found.outputs)
        on_meta = isinstance(new, nn.Module) and any(parameter.is_meta for parameter in new.parameters())
        spy = Spy()
        caches = torch.is_autocast_cache_enabled()
        # it would keep fake casts of real weights
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.no_grad(), pretended(), mode, spy:
                inputs = [_value(item, module, mode.shape_env, on_meta) for item in found.inputs]
                result = whole = new(*inputs)
                if isinstance(result, Tensor) and len(found.outputs) > 1:
                    result = split_parts(result, tuple(node_width(node) for node in found.outputs))
        except Exception as error:
            found_ = f"{_name(new)} does not run on the inputs of the match: {type(error).__name__}: {error}"
            raise RewriteError([Problem(found_)]) from error
        finally:
            torch.set_autocast_cache_enabled(caches)
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(found.outputs) or not all(
            _may_take(node, value, found) for node, value in zip(found.outputs, results, strict=True)
        ):
            looks = ", ".join(map(_look, results)), ", ".join(_look(node.meta["val"]) for node in found.outputs)
            hint = "a value that only leaves the module may become None"
            raise RewriteError([Problem(f"{_name(new)} gives {looks[0]}; the match gives {looks[1]}", hint)])
        return whole, spy.random


def _value(item: Any, module: nn.Module, shapes: Any, on_meta: bool) -> Any:
    """A fake tensor, a symbolic size or a constant for what an argument of the pattern stands for."""

    def value(item: Any) -> Any:
        if isinstance(item, Attribute):
            return functools.reduce(getattr, item.path.split("."), module)
        if not isinstance(item, fx.Node):
            return item
        if "val" not in item.meta:
            size = item.meta["size"]
            return shapes.create_symintnode(size, hint=int(shapes.guarding_hint_or_throw(size)))
        return torch.empty_like(item.meta["val"], device="meta") if on_meta else item.meta["val"]

    return pytree.tree_map(value, item)


def split_parts(x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(..., whole) -> one (..., part) for each width, in their proportions: a rank's x has its share of each."""
    whole = sum(widths)
    return x.split([width * x.shape[-1] // whole for width in widths], dim=-1)


def node_width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])


def _may_take(node: fx.Node, value: Any, found: Found) -> bool:
    """Whether ``value`` can take the place of ``node``."""
    # as the attention weights are that transformers' own efficient attention leaves out
    only_leaves = all(user.op == "output" or user in found.nodes for user in node.users)
    return (value is None and only_leaves) or _look(value) == _look(node.meta["val"])


def _look(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{[str(size) for size in value.shape]}".replace("'", "")


def _name(new: Any) -> str:
    return getattr(new, "__name__", type(new).__name__)
