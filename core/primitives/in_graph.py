"""Rewriting the graphs of a traced module at a match: checked on copies of all of them, then done."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ..errors import Problem, TraceError
from ..exchange import Exchange
from ..execution import change_plan, has_hooks, plan_of
from ..match import Match, Place
from ..patterns import Attribute
from ..primitive import Site
from ..state import skeleton_of
from ..tracing.rewrites import AtMatch, ReplaceAt, node_width, split_parts
from ..tracing.traced import RewriteError, Traced, present
from ..weights import Expression
from .trace import current, graph_of

MakeRewrite = Callable[[Place], AtMatch]


def check_rewrite(site: Site, match: Match, make: MakeRewrite) -> Iterator[Problem]:
    """Why a rewrite at ``match`` is not possible; it is tried on copies."""
    if not isinstance(match, Match):
        yield Problem(f"the match is a {type(match).__name__}", "pass one of find(pattern) or match(pattern)")
    elif match.path != site.path:
        yield Problem(f"the match was found in {match.path!r}", f"sch[{match.path!r}]")
    elif graph_of(site) is None:
        yield Problem("this module has no graph", "trace() or find(pattern)")
    else:
        try:
            rewritten(site, match, make)
        except RewriteError as error:
            yield from error.problems
        except TraceError as error:
            yield Problem(str(error))


def rewritten(site: Site, match: Match, make: MakeRewrite) -> Traced:
    """The graphs with the rewrite done. Raises RewriteError."""
    traced = current(site)
    place = Place.of(match, [kind.graph for kind in traced.kinds], site.module)
    return traced.with_rewrite(make(place), site.module)


def apply_rewrite(site: Site, match: Match, make: MakeRewrite) -> None:
    change_plan(site.module, site.mesh, graph=rewritten(site, match, make))


def made(new: nn.Module | Callable[..., Any], old: nn.Module) -> Any:
    """A copy of a module, or what a function makes out of the old one."""
    return copy.deepcopy(new) if isinstance(new, nn.Module) else new(old)


class InGraph:
    """``replace`` at a match: a function called in its place, or a module under ``name`` that takes over weights."""

    def __init__(
        self,
        site: Site,
        match: Match,
        call: str,
        new: Any,
        name: str | None,
        mapping: Mapping[str, Expression | str] | None,
    ) -> None:
        self._site, self._match, self._call = site, match, call
        self._new, self._name, self._mapping = new, name, mapping

    def check(self) -> Iterator[Problem]:
        problems = list(check_rewrite(self._site, self._match, self._search))
        problems = problems or list(self._check_new()) or list(self._check_leaves())
        yield from problems
        if problems:
            return
        if self._name is None:
            yield from check_rewrite(self._site, self._match, self._rewrite)
            return
        new = made(self._new, self._site.module)
        problems = list(self._exchange(new).problems(self._outside()))
        yield from problems
        if not problems:
            with present(self._site.module, {self._name: new}):
                yield from check_rewrite(self._site, self._match, self._rewrite)

    def apply(self) -> None:
        site = self._site
        if self._name is None:
            instead = dict.fromkeys(self._leaves(), getattr(self._new, "__name__", repr(self._new)))
            graphs = rewritten(site, self._match, self._rewrite)
            graphs = dataclasses.replace(graphs, bypassed={**graphs.bypassed, **instead})
            change_plan(site.module, site.mesh, graph=graphs)
            return
        new = made(self._new, site.module).train(site.module.training)
        exchange = self._exchange(new)
        stand_ins = self._stand_ins(new)
        exchange.fill(site.state)
        site.module.add_module(self._name, new)
        apply_rewrite(site, self._match, self._rewrite)
        for path in stand_ins:
            parent, _, leaf = path.rpartition(".")
            del site.module.get_submodule(parent)._modules[leaf]
        exchange.settle(site.state)
        traced = graph_of(site)
        assert traced is not None
        stand_ins = {**traced.stand_ins, **stand_ins}
        change_plan(site.module, site.mesh, graph=dataclasses.replace(traced, stand_ins=stand_ins))

    def _search(self, place: Place) -> AtMatch:
        return _Search(place, self._call)

    def _rewrite(self, place: Place) -> AtMatch:
        return ReplaceAt(place, self._call, self._new, self._name)

    def _check_new(self) -> Iterator[Problem]:
        if not callable(self._new):
            yield Problem(f"new is a {type(self._new).__name__}", "pass a function, or a module with name=")
        elif self._name is None and isinstance(self._new, nn.Module):
            yield Problem("a module needs a name, under which it becomes a child", 'name="..."')
        elif self._name is None and self._mapping is not None:
            yield Problem("a mapping fills the parameters of a new module, which needs a name", 'name="..."')
        elif self._name is not None and hasattr(self._site.module, self._name):
            yield Problem(f"{type(self._site.module).__name__} has {self._name!r} already", "choose another name")
        elif self._name is not None and not isinstance(made(self._new, self._site.module), nn.Module):
            yield Problem("with name=, new must be a module or a function that makes one", "leave out name")

    def _check_leaves(self) -> Iterator[Problem]:
        """The children whose calls go away must not be needed, nor what was scheduled on them lost."""
        for path, nodes in self._leaves().items():
            leaf = self._site.module.get_submodule(path)
            plan = plan_of(leaf)
            if plan is not None and (plan.syncs or plan.kernel or plan.graph or plan.random != "default"):
                yield Problem(f"other primitives have changed {path!r}, whose call would go", "replace before them")
            elif has_hooks(leaf):
                yield Problem(f"{path!r} has hooks, which would not be called any more", "remove them first")
            elif self._loses_weights(leaf, path, nodes):
                yield Problem(
                    f"the weights of {path!r} would be used by nothing",
                    "a module with name= and mapping= takes them over, or a pattern names them: F.linear(x, weight)",
                )
            sharded = [name for name in self._old_names(path) if name in self._site.state.layouts]
            if self._name is not None and sharded:
                yield Problem(f"{', '.join(sharded)} is sharded", "replace before shard")
            if self._name is not None and any(True for _ in leaf.buffers()):
                yield Problem(f"{path!r} has buffers, which would be lost")

    def _loses_weights(self, leaf: nn.Module, path: str, nodes: Sequence[fx.Node]) -> bool:
        if self._name is not None or not any(True for _ in leaf.parameters()):
            return False
        used = {item.path for item in self._found().inputs if isinstance(item, Attribute)}
        return not all(f"{path}.{name}" in used for name, _ in leaf.named_parameters())

    def _old_names(self, path: str) -> list[str]:
        leaf = self._site.module.get_submodule(path)
        return [self._site.state.canonical(parameter) for parameter in leaf.parameters()]

    def _found(self) -> Any:
        graphs, module = [kind.graph for kind in current(self._site).kinds], self._site.module
        place = Place.of(self._match, graphs, module)
        return next(found for graph in graphs if (found := place.locate(graph, module)) is not None)

    def _leaves(self) -> dict[str, list[fx.Node]]:
        """The children that only the match calls, with their calls."""
        nodes = self._found().nodes
        calls: dict[str, list[fx.Node]] = {}
        for node in nodes[0].graph.nodes:
            if node.op == "call_module":
                calls.setdefault(str(node.target), []).append(node)
        return {path: found for path, found in calls.items() if all(node in nodes for node in found)}

    def _exchange(self, new: nn.Module) -> Exchange:
        old = {
            f"{path}.{name}": parameter
            for path in self._leaves()
            for name, parameter in self._site.module.get_submodule(path).named_parameters()
        }
        return Exchange(old, new, self._mapping)

    def _outside(self) -> set[int]:
        leaves = [f"{self._site.path}.{path}".strip(".") for path in self._leaves()]
        # Every path of a module that stands in several places, not only its first.
        places = self._site.state.model.named_modules(remove_duplicate=False)
        outside = (m for path, m in places if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves))
        return {id(parameter) for module in outside for parameter in module._parameters.values()}

    def _stand_ins(self, new: nn.Module) -> dict[str, nn.Module]:
        """For the children whose weights ``new`` takes over: the module's own forward calls them when it is recorded
        again. A sibling that reads the match's one input gives what ``new`` gives for it, so it is split as that is."""
        found = self._found()
        stand_ins: dict[str, nn.Module] = {}
        for path, nodes in self._leaves().items():
            leaf = self._site.module.get_submodule(path)
            if not any(True for _ in leaf.parameters()):
                continue
            stand_ins[path] = skeleton_of(leaf)
            if list(nodes[0].all_input_nodes) == list(found.inputs) and nodes[0] in found.outputs:
                index, widths = found.outputs.index(nodes[0]), tuple(map(node_width, found.outputs))
                change_plan(stand_ins[path], self._site.mesh, graph=functools.partial(_part_of, new, index, widths))
        return stand_ins


def _part_of(new: nn.Module, index: int, widths: tuple[int, ...], _: nn.Module, __: Any, x: Any) -> Any:
    result = new(x)
    return split_parts(result, widths)[index] if isinstance(result, Tensor) else result[index]


@dataclasses.dataclass(frozen=True)
class _Search(ReplaceAt):
    """Only asks whether the match is there and could go."""

    new: Callable[..., Any] = callable
    name: str | None = None

    def rewrite(self, graph: fx.Graph, found: Any, module: nn.Module) -> None:
        pass
