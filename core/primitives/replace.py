"""``replace`` and ``replace_all``: put another module in a module's place and keep its weights."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..errors import Problem, did_you_mean
from ..execution import plan_of
from ..primitive import Primitive, Site
from ..state import evaluate
from ..weights import Expression, Source, as_expression

Make = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Replace(Primitive):
    """Put ``new`` in this module's place; ``mapping`` says what its parameters are made of.

    ::

        attn.q_proj (8, 4), k_proj (2, 4), v_proj (2, 4)
          --replace(fuse_qkv, {"qkv_proj.weight": cat(["q_proj.weight", "k_proj.weight", "v_proj.weight"])})-->
        attn.qkv_proj (12, 4)

    ``new`` is a module, of which a copy is inserted, or a function that makes one out of the old module; only a
    function that can be imported can be saved with the history. Its parameters are filled from the old ones, so it may
    as well be made on the meta device. A parameter that is not in ``mapping`` is the old one of the same name; such a
    parameter stays the same object, ties included. Every old parameter must be used exactly once: nothing is lost.
    """

    verb: ClassVar[str] = "replace"
    new: nn.Module | Make
    mapping: Mapping[str, Expression | str] | None = None

    def check(self, site: Site) -> Iterator[Problem]:
        if not site.path:
            yield Problem("the whole model cannot be replaced", "schedule the other model instead")
            return
        planned = [path for path, module in site.module.named_modules() if plan_of(module) is not None]
        sharded = [name for name in _own_names(site) if name in site.state.layouts]
        if planned or sharded:
            what = sorted({*sharded, *(f"{site.path}.{path}".rstrip(".") for path in planned)})
            yield Problem(f"other primitives have changed {', '.join(map(repr, what))}", "replace before them")
            return
        new = self._make(site.module)
        if not isinstance(new, nn.Module):
            yield Problem(f"the new module is a {type(new).__name__}", "pass a module or a function that returns one")
            return
        problems = list(self._check_names(site.module, new))
        yield from problems or self._check_tensors(site, new)

    def _check_names(self, old: nn.Module, new: nn.Module) -> Iterator[Problem]:
        old_names, new_names = _names(old), _names(new)
        expressions = self._expressions(old, new)
        for name, expression in expressions.items():
            if name not in new_names:
                yield Problem(f"the mapping fills {name!r}, which the new module lacks", did_you_mean(name, new_names))
            for source in expression.names():
                if source not in old_names:
                    yield Problem(
                        f"{name!r} is made of {source!r}, which does not exist", did_you_mean(source, old_names)
                    )
        for name in new_names:
            if name not in expressions:
                yield Problem(f"nothing says what {name!r} of the new module is made of", "add it to the mapping")
        used = [source for expression in expressions.values() for source in expression.names()]
        for name in old_names:
            if used.count(name) != 1:
                yield Problem(f"the weights of {name!r} are used {used.count(name)} times", "every one exactly once")

    def _check_tensors(self, site: Site, new: nn.Module) -> Iterator[Problem]:
        old = site.module
        shapes = {name: tuple(parameter.shape) for name, parameter in _named(old).items()}
        wanted = {name: tuple(parameter.shape) for name, parameter in _named(new).items()}
        # Every path of a module that stands in several places, not only its first.
        places = site.state.model.named_modules(remove_duplicate=False)
        outside = {id(p) for path, m in places if not _within(path, site.path) for p in m._parameters.values()}
        for name, expression in self._expressions(old, new).items():
            try:
                made = expression.shape(shapes)
            except ValueError as error:
                yield Problem(f"{name!r}: {error}")
                continue
            if made != wanted[name]:
                yield Problem(f"{name!r} is {list(wanted[name])}, but its weights make {list(made)}")
            if not isinstance(expression, Source):
                tied = [source for source in expression.names() if id(_named(old)[source]) in outside]
                if tied:
                    yield Problem(f"{', '.join(tied)} is tied to a parameter outside and would come apart")
        for name, buffer in old.state_dict(keep_vars=True).items():
            if name not in shapes and name not in new.state_dict():
                yield Problem(f"the new module lacks the buffer {name!r} of shape {list(buffer.shape)}")
        known = dict(old.named_buffers())
        for name, buffer in new.named_buffers():
            if buffer.is_meta and name not in known:
                yield Problem(f"the buffer {name!r} is on the meta device and the old module has none of that name")

    def apply(self, site: Site) -> None:
        state, path, old = site.state, site.path, site.module
        old_named = _named(old)
        full_names = {name: state.canonical(parameter) for name, parameter in old_named.items()}
        new = self._make(old)
        expressions = self._expressions(old, new)
        made: dict[str, nn.Parameter] = {}
        for name, expression in expressions.items():
            if isinstance(expression, Source):
                made[name] = old_named[expression.name]
            else:
                sources = [old_named[source] for source in expression.names()]
                tensor = evaluate(expression, {n: p.detach() for n, p in old_named.items()})
                made[name] = nn.Parameter(tensor.contiguous(), requires_grad=any(p.requires_grad for p in sources))
        _fill(new, made, dict(old.named_buffers()))
        entries = {n: state.weights[n] for n in full_names.values()}
        by_local = {name: entries[full] for name, full in full_names.items()}
        parent, _, leaf = path.rpartition(".")
        setattr(state.model.get_submodule(parent), leaf, new.train(old.training))
        state.structure_changed()
        for full in entries:
            state.weights.pop(full, None)
        for name, expression in expressions.items():
            full = state.canonical(made[name])
            state.weights[full] = expression.substitute(by_local)
            notes = [state.annotations.pop(full_names[source], None) for source in expression.names()]
            if isinstance(expression, Source) and notes[0]:
                state.annotations[full] = notes[0]
        order = {name: i for i, (name, _) in enumerate(state.model.named_parameters())}
        state.weights = dict(sorted(state.weights.items(), key=lambda item: order[item[0]]))
        assert list(state.weights) == list(order)

    def _make(self, old: nn.Module) -> nn.Module:
        return copy.deepcopy(self.new) if isinstance(self.new, nn.Module) else self.new(old)

    def _expressions(self, old: nn.Module, new: nn.Module) -> dict[str, Expression]:
        explicit = {name: as_expression(value) for name, value in (self.mapping or {}).items()}
        old_named, new_named = _named(old), _named(new)
        same: dict[str, Expression] = {
            name: Source(name)
            for name in new_named
            if name not in explicit and name in old_named and old_named[name].shape == new_named[name].shape
        }
        return {
            name: {**explicit, **same}[name] for name in [*new_named, *explicit] if name in explicit or name in same
        }


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


def _names(module: nn.Module) -> list[str]:
    return list(_named(module))


def _own_names(site: Site) -> list[str]:
    return [site.state.canonical(parameter) for parameter in site.module.parameters()]


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.") or not parent


def _fill(new: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, object]) -> None:
    """Put ``parameters`` and the old buffers of the same name in the place of what ``new`` was made with."""
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        new.get_submodule(module)._parameters[leaf] = parameter
    for name, _ in list(new.named_buffers()):
        if name in buffers:
            module, _, leaf = name.rpartition(".")
            new.get_submodule(module)._buffers[leaf] = buffers[name]  # type: ignore[assignment]
