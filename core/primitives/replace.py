"""``replace`` and ``replace_all``: put another module in a module's place and keep its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import Problem
from ..exchange import Exchange
from ..execution import plan_of
from ..match import Match
from ..primitive import Primitive, Site
from ..weights import Expression
from .in_graph import InGraph, made

Make = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Replace(Primitive):
    """Put ``new`` in this module's place; ``mapping`` says what its parameters are made of.

    ::

        fc (64, 8)  --replace(transposed, {"matrix": transpose("weight")})-->  matrix (8, 64)

    ``new`` is a module, of which a copy is inserted, or a function that makes one out of the old module; only a
    function that can be imported can be saved with the history. Its parameters are filled from the old ones, so it may
    as well be made on the meta device. A parameter that is not in ``mapping`` is the old one of the same name; such a
    parameter stays the same object, ties included. Every old parameter must be used exactly once: nothing is lost.

    With ``at=`` the match gives way instead of the module, in the module's graph::

        q_proj (8, 4), k_proj (2, 4), v_proj (2, 4), siblings that read x
          --replace(fused, at=match, name="qkv", mapping={"weight": cat(["q_proj.weight", ...])})-->  qkv (12, 4)
        matmul, softmax, dropout, matmul  --replace(efficient_attention, at=match)-->  efficient_attention(q, k, v)

    With ``name`` the new module (or what ``new(module)`` makes) becomes a child of that name; ``mapping`` names
    parameters of the children that go by their path below this module. Without, ``new`` is a function that is called
    in the graph. Either is called with what the arguments of the pattern matched, and returns what the pattern does.
    """

    verb: ClassVar[str] = "replace"
    new: nn.Module | Callable[..., Any]
    mapping: Mapping[str, Expression | str] | None = None
    at: Match | None = None
    name: str | None = None

    def check(self, site: Site) -> Iterator[Problem]:
        if self.at is not None:
            yield from self._in_graph(site, self.at).check()
        elif self.name is not None:
            yield Problem("name= is for a module that takes a match's place", "at=match")
        elif not site.path:
            yield Problem("the whole model cannot be replaced", "schedule the other model instead")
        else:
            yield from self._check(site)

    def _check(self, site: Site) -> Iterator[Problem]:
        planned = [path for path, module in site.module.named_modules() if plan_of(module) is not None]
        sharded = [name for name in _own_names(site) if name in site.state.layouts]
        if planned or sharded:
            what = sorted({*sharded, *(f"{site.path}.{path}".rstrip(".") for path in planned)})
            yield Problem(f"other primitives have changed {', '.join(map(repr, what))}", "replace before them")
            return
        new = made(self.new, site.module)
        if not isinstance(new, nn.Module):
            yield Problem(f"the new module is a {type(new).__name__}", "pass a module or a function that returns one")
            return
        problems = list(Exchange(_named(site.module), new, self.mapping).problems(_outside(site)))
        yield from problems or _check_buffers(site.module, new)

    def touches(self, site: Site) -> Iterator[str]:
        return iter(()) if self.at is not None else super().touches(site)

    def apply(self, site: Site) -> None:
        if self.at is not None:
            self._in_graph(site, self.at).apply()
            return
        state, path, old = site.state, site.path, site.module
        new = made(self.new, old)
        exchange = Exchange(_named(old), new, self.mapping)
        exchange.fill(state)
        _keep_buffers(new, dict(old.named_buffers()))
        parent, _, leaf = path.rpartition(".")
        setattr(state.model.get_submodule(parent), leaf, new.train(old.training))
        exchange.settle(state)

    def _in_graph(self, site: Site, match: Match) -> InGraph:
        return InGraph(site, match, self.as_call(), self.new, self.name, self.mapping)


@dataclass(frozen=True)
class ReplaceAll(Primitive):
    """``replace`` every module below this node that ``which`` matches (a type, a path glob or a predicate).

    ::

        sch.replace_all(nn.GELU, fast_gelu)       # fast_gelu(old: nn.GELU) -> nn.Module

    All of them are checked before the first is replaced. Raises ScheduleError when nothing matches.
    """

    verb: ClassVar[str] = "replace_all"
    which: type[nn.Module] | str | Callable[[nn.Module], bool]
    make: Make
    mapping: Mapping[str, Expression | str] | None = None

    def check(self, site: Site) -> Iterator[Problem]:
        found = list(self._sites(site))
        if not found:
            yield Problem(f"nothing below {site.path or 'the model'!r} matches")
        for below in found:
            for problem in self._replace().check(below):
                yield Problem(f"{below.path}: {problem.found}", problem.hint)

    def apply(self, site: Site) -> None:
        for below in list(self._sites(site)):
            self._replace().apply(below)

    def _replace(self) -> Replace:
        return Replace(self.make, self.mapping)

    def _sites(self, site: Site) -> Iterator[Site]:
        done: list[str] = []
        for path, module in site.module.named_modules():
            inside_another = any(_within(path, other) for other in done)
            if path and not inside_another and self._matches(path, module):
                done.append(path)
                yield Site(site.state, f"{site.path}.{path}".lstrip("."))

    def _matches(self, path: str, module: nn.Module) -> bool:
        if isinstance(self.which, str):
            return fnmatch.fnmatchcase(path, self.which)
        if isinstance(self.which, type):
            return isinstance(module, self.which)
        return bool(self.which(module))


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _own_names(site: Site) -> list[str]:
    return [site.state.canonical(parameter) for parameter in site.module.parameters()]


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.") or not parent


def _outside(site: Site) -> set[int]:
    # Every path of a module that stands in several places, not only its first.
    places = site.state.model.named_modules(remove_duplicate=False)
    return {id(p) for path, module in places if not _within(path, site.path) for p in module._parameters.values()}


def _check_buffers(old: nn.Module, new: nn.Module) -> Iterator[Problem]:
    parameters, kept = dict(old.named_parameters()), new.state_dict()
    for name, buffer in old.state_dict(keep_vars=True).items():
        if name not in parameters and name not in kept:
            yield Problem(f"the new module lacks the buffer {name!r} of shape {list(buffer.shape)}")
    known = dict(old.named_buffers())
    for name, buffer in new.named_buffers():
        if buffer.is_meta and name not in known:
            yield Problem(f"the buffer {name!r} is on the meta device and the old module has none of that name")


def _keep_buffers(new: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """The old buffers in the place of those that ``new`` was made with."""
    for name, _ in list(new.named_buffers()):
        if name in buffers:
            module, _, leaf = name.rpartition(".")
            new.get_submodule(module)._buffers[leaf] = buffers[name]
