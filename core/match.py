"""Matches: places in the graph of a traced module, as a user holds them and as a rewrite finds them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from .errors import Problem
from .patterns import Found, find_pattern
from .tracing.region import outputs_of
from .tracing.traced import RewriteError

Pattern = Callable[..., Any]


@dataclass(frozen=True)
class Match:
    """Some nodes of the graph of the module at ``path``: what ``find`` gives, and the graph verbs take.

    ``pattern`` is the function that matched; None where single nodes were asked for.
    """

    path: str
    nodes: tuple[str, ...]
    pattern: Pattern | None = None

    @property
    def title(self) -> str:
        """The name of the pattern, or those of the nodes."""
        return ", ".join(self.nodes) if self.pattern is None else self.pattern.__name__

    def __str__(self) -> str:
        return f"{'node' if self.pattern is None else self.title}({', '.join(self.nodes)})"

    __repr__ = __str__


def find_matches(path: str, graph: fx.Graph, module: nn.Module, pattern: Pattern) -> list[Match]:
    """The matches of a pattern in the graph of ``module``. Raises PatternError."""
    found = find_pattern(graph, module, pattern)
    return [Match(path, tuple(node.name for node in each.nodes), pattern) for each in found]


def find_nodes(path: str, graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> list[Match]:
    """A match for each operation that the predicate takes."""
    return [Match(path, (node.name,)) for node in graph.nodes if node.op.startswith("call_") and predicate(node)]


@dataclass(frozen=True)
class Place:
    """A match in a way that holds for the other graphs of its module: the ``index``-th of ``count`` matches."""

    match: Match
    index: int
    count: int

    @staticmethod
    def of(match: Match, graphs: Sequence[fx.Graph], module: nn.Module) -> Place:
        """Raises RewriteError when the nodes of the match are in none of the graphs any more."""
        for graph in graphs:
            if match.pattern is None:
                present = [match] if set(match.nodes) <= {node.name for node in graph.nodes} else []
            else:
                present = find_matches(match.path, graph, module, match.pattern)
            if match in present:
                return Place(match, present.index(match), len(present))
        found = f"the match {match} is not in the graph any more"
        raise RewriteError([Problem(found, "another step has used its nodes: find again")])

    def locate(self, graph: fx.Graph, module: nn.Module) -> Found | None:
        """The match in another graph of the module, None where nothing of the kind is there.

        Raises RewriteError when the graph has another number of matches, so that it is not clear which one is meant.
        """
        if self.match.pattern is None:
            return self._by_name(graph)
        found = find_pattern(graph, module, self.match.pattern)
        if not found:
            return None
        if len(found) != self.count:
            raise RewriteError([Problem(f"{len(found)} matches of {self.match} where there were {self.count}")])
        return found[self.index]

    def _by_name(self, graph: fx.Graph) -> Found | None:
        nodes = [node for node in graph.nodes if node.name in self.match.nodes]
        if len(nodes) != len(self.match.nodes):
            return None
        inside = dict.fromkeys(nodes)
        inputs = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
        return Found(tuple(nodes), tuple(inputs), tuple(outputs_of(graph, nodes)))
