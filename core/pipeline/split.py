"""Splits the graph of a whole model at its marks: what each stage computes, receives, reads and sends.

Nodes go to stages in program order. What derives from the model's inputs, sizes and buffers alone (masks, position ids,
rotary tables) is computed on each stage that needs it; sizes are given to it as numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import Problem
from ..tracing.modes import Mark
from ..tracing.product import Product
from ..tracing.symbols import expression
from ..tracing.values import Unflatten

_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


class SplitError(Exception):
    """A graph that cannot be cut where it was asked to be."""

    def __init__(self, found: str, hint: str = "") -> None:
        super().__init__(found)
        self.problem = Problem(found, hint)


@dataclass(frozen=True)
class Value:
    """A tensor that crosses a boundary; sizes in ``shape`` are numbers or symbols of the inputs' sizes."""

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Part:
    """What one stage does with one kind of batch.

    ``received`` and ``sent`` are in the order of the wire, those with a gradient first. ``raw`` are inputs of the
    model, ``facts`` sizes (and, for None, the device). The graph takes the stage, then received, raw and facts; it
    gives the list of sent tensors, the last stage that of the model's outputs. ``modules`` and ``tensors`` are paths
    that it uses.
    """

    received: tuple[Value, ...]
    raw: tuple[str, ...]
    sent: tuple[Value, ...]
    facts: tuple[Any, ...]
    graph: fx.Graph
    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    has_modes: bool


def split(
    graph: fx.Graph, cuts: Sequence[str], replace: Callable[[Any], Any], kept: Sequence[bool]
) -> tuple[list[str], list[Part]]:
    """The cuts in the order in which they are reached, and the parts between them.

    ``replace`` simplifies symbols; of the model's outputs only those that are ``kept`` are computed. Raises SplitError.
    """
    return _Splitter(graph, replace, kept).split(cuts)


class _Splitter:
    def __init__(self, graph: fx.Graph, replace: Callable[[Any], Any], kept: Sequence[bool]) -> None:
        self.nodes = [node for node in graph.nodes if not isinstance(node.target, Mark)]
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.marks: dict[str, int] = {}
        for node in graph.nodes:
            if isinstance(node.target, Mark):
                # the last call counts
                self.marks[node.target.path] = self.order[node]
        self.replace = replace
        flat = self.nodes[-1].args[0]
        assert isinstance(flat, (list, tuple))
        self.outputs = [leaf if keep else None for leaf, keep in zip(flat, kept, strict=True)]
        self.mutators: dict[Any, list[fx.Node]] = {}
        for node in self.nodes:
            for storage in node.meta.get("mutates", ()):
                self.mutators.setdefault(storage, []).append(node)
        self.free = self._find_free()

    # ------------------------------------------------------------------ what every stage can compute by itself

    def _find_free(self) -> set[fx.Node]:
        bound: set[Any] = set()
        while True:
            free: set[fx.Node] = set()
            for node in self.nodes:
                if node.meta.get("storage") not in bound and self._is_free(node, free):
                    free.add(node)
            # What is written to by a node that is not free is not free either.
            late = {s for s, writers in self.mutators.items() if any(writer not in free for writer in writers)}
            if late <= bound:
                return free
            bound |= late

    def _is_free(self, node: fx.Node, free: set[fx.Node]) -> bool:
        if node.op in ("placeholder", "get_attr"):
            # A frozen parameter stays where it is: it may be large.
            is_parameter = node.op == "get_attr" and node.meta["is_parameter"]
            return not is_parameter and not node.meta.get("requires_grad", False)
        if _is_fact(node):
            return True
        if node.op in ("call_module", "output") or isinstance(node.target, Product):
            return False
        if any(node.meta.get(what) for what in ("random", "effect", "requires_grad")):
            return False
        return all(known in free for known in node.all_input_nodes)

    # ------------------------------------------------------------------ places

    def split(self, cuts: Sequence[str]) -> tuple[list[str], list[Part]]:
        for cut in cuts:
            if cut not in self.marks:
                raise SplitError(f"{cut!r} is not called with these inputs, so no stage can end after it")
        cuts = sorted(cuts, key=self.marks.__getitem__)
        self._place(cuts)
        self._check_modes(cuts)
        self._check_writes()
        count = len(cuts) + 1
        self.bodies: list[set[fx.Node]] = [set() for _ in range(count)]
        self.needs: list[set[fx.Node]] = [set() for _ in range(count)]
        for stage in reversed(range(count)):
            self._fill(stage)
        live = [self._live(boundary) for boundary in range(count - 1)]
        self._check_crossing(cuts, live)
        parts = []
        for stage in range(count):
            received = live[stage - 1] if stage else []
            sent = live[stage] if stage < count - 1 else None
            parts.append(_Builder(self, stage).build(received, sent))
        return cuts, parts

    def _place(self, cuts: Sequence[str]) -> None:
        ends = [self.marks[cut] for cut in cuts]
        self.starts = [0, *ends]
        self.stage = {node: sum(self.order[node] > end for end in ends) for node in self.nodes}
        bounds = [-1, *ends, self.order[self.nodes[-1]]]
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            bound = (node for node in self.nodes if node not in self.free and node.op != "get_attr")
            if not any(start < self.order[node] < end for node in bound):
                where = f"after {cuts[i - 1]!r}" if i else "before the first cut"
                what = f"and {cuts[i]!r} " if 0 < i < len(cuts) else ""
                raise SplitError(f"nothing happens {where} {what}that would make a stage", "leave one cut out")

    def _check_modes(self, cuts: Sequence[str]) -> None:
        """A stage starts and ends outside of no_grad and autocast blocks."""
        for cut, end in zip(cuts, self.starts[1:], strict=True):
            before = [node for node in self.nodes if self.order[node] < end and _is_mode(node)]
            depth = 0
            for node in before:
                depth += {"_enter_autocast": 1, "_exit_autocast": -1}.get(_name(node), 0)
            gradients = [node.args[0] for node in before if _name(node) == "_set_grad_enabled"]
            if depth or (gradients and gradients[-1] is not torch.is_grad_enabled()):
                raise SplitError(f"{cut!r} ends inside a no_grad or autocast block", "cut after the block")

    def _check_writes(self) -> None:
        for node in self.nodes:
            storage = node.meta.get("storage")
            if storage is None or storage not in self.mutators:
                continue
            where = self.mutators[storage][0].meta.get("where")
            if node.op == "placeholder":
                raise SplitError(f"its input {node.name!r} is written to in place\n  at {where}")
            users = {self.stage[user] for user in node.users}
            if node.op == "get_attr" and len(users) > 1:
                raise SplitError(f"{node.target} is written to in place and used by several stages\n  at {where}")

    # ------------------------------------------------------------------ what a stage needs

    def _fill(self, stage: int) -> None:
        later = set().union(*self.needs[stage + 1 :])
        for node in self.nodes:
            if self.stage[node] != stage or node in self.free:
                continue
            does_more = node.meta.get("mutates") or (node.meta.get("effect") and not _is_mode(node))
            if does_more or node.op == "call_module" or node in later:
                self._require(stage, node)
        if stage == len(self.bodies) - 1:
            for output in self.outputs:
                if isinstance(output, fx.Node):
                    self._require(stage, output)

    def _require(self, stage: int, node: fx.Node) -> None:
        if node in self.bodies[stage] or node in self.needs[stage]:
            return
        if node in self.free or self.stage[node] == stage or node.op == "get_attr" or _is_container(node):
            self.bodies[stage].add(node)
            for needed in self._dependencies(node):
                self._require(stage, needed)
        else:
            self.needs[stage].add(node)

    def _dependencies(self, node: fx.Node) -> Iterator[fx.Node]:
        """What is computed before: its inputs, and the writes to their memory in between."""
        if _is_fact(node):
            return
        for known in node.all_input_nodes:
            yield known
            for writer in self.mutators.get(known.meta.get("storage"), ()):
                if self.order[known] < self.order[writer] < self.order[node]:
                    yield writer

    def _live(self, boundary: int) -> list[fx.Node]:
        crossing = {node for needed in self.needs[boundary + 1 :] for node in needed if self.stage[node] <= boundary}
        return sorted(crossing, key=lambda node: (not node.meta.get("requires_grad"), self.order[node]))

    def _check_crossing(self, cuts: Sequence[str], live: Sequence[list[fx.Node]]) -> None:
        for cut, nodes in zip(cuts, live, strict=True):
            for node in nodes:
                where = node.meta.get("where")
                if not isinstance(node.meta.get("val"), Tensor):
                    raise SplitError(
                        f"{node.name!r}, which is no tensor, is needed after the cut {cut!r}\n  at {where}"
                    )
        for stage, nodes in enumerate(live, start=1):
            for node in nodes:
                for writer in self.mutators.get(node.meta["storage"], ()):
                    if writer in self.bodies[stage]:
                        raise SplitError(
                            f"{node.name!r}, which an earlier stage makes, is written to in place by stage {stage}"
                            f"\n  at {writer.meta.get('where')}",
                            "move the cut",
                        )

    def value(self, node: fx.Node) -> Value:
        look = node.meta["val"]
        shape = tuple(_number(self.replace(expression(size))) for size in look.shape)
        return Value(node.name, shape, look.dtype, bool(node.meta.get("requires_grad")))


class _Builder:
    """The graph of one stage."""

    def __init__(self, splitter: _Splitter, stage: int) -> None:
        self.splitter, self.stage = splitter, stage
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.facts: dict[Any, fx.Node] = {}

    def build(self, received: list[fx.Node], sent: list[fx.Node] | None) -> Part:
        splitter, own = self.splitter, sorted(self._own(), key=self.splitter.order.__getitem__)
        root = next(iter(splitter.nodes))
        self.made[root] = self.graph.placeholder("self")
        raw = [node for node in own if node.op == "placeholder" and node is not root]
        for node in (*received, *raw):
            self.made[node] = self.graph.placeholder(node.name)
            self.made[node].meta = dict(node.meta)
        for node in own:
            if _is_fact(node):
                self.made[node] = self._fact(node)
        for node in own:
            if node.op not in ("placeholder", "output") and not _is_fact(node):
                self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
        result = splitter.outputs if sent is None else sent
        self.graph.output(fx.node.map_arg(list(result), self.made.__getitem__))
        self.graph.lint()
        return Part(
            received=tuple(map(splitter.value, received)),
            raw=tuple(node.name for node in raw),
            sent=() if sent is None else tuple(map(splitter.value, sent)),
            facts=tuple(self.facts),
            graph=self.graph,
            modules=tuple(dict.fromkeys(path for node in own for path in _modules(node))),
            tensors=tuple(dict.fromkeys(str(node.target) for node in own if node.op == "get_attr")),
            has_modes=any(map(_is_mode, own)),
        )

    def _own(self) -> set[fx.Node]:
        splitter = self.splitter
        start, body = splitter.starts[self.stage], splitter.bodies[self.stage]
        recomputes = any(splitter.order[node] < start for node in body if node.op not in ("placeholder", "get_attr"))
        # What is recomputed stands in the blocks that it stood in.
        modes = [
            node
            for node in splitter.nodes
            if _is_mode(node) and (splitter.stage[node] == self.stage or (recomputes and splitter.order[node] < start))
        ]
        return {*body, *modes}

    def _fact(self, node: fx.Node) -> fx.Node:
        fact = None if node.meta["kind"] == "device" else self.splitter.replace(node.meta["size"])
        if fact not in self.facts:
            self.facts[fact] = self.graph.placeholder("device" if fact is None else f"size_{len(self.facts)}")
        return self.facts[fact]


def _is_fact(node: fx.Node) -> bool:
    """A size or a device, which a stage is told."""
    kind = node.meta.get("kind")
    return node.op != "placeholder" and (kind == "device" or (kind == "sym" and "size" in node.meta))


def _is_container(node: fx.Node) -> bool:
    return node.op == "call_function" and (isinstance(node.target, Unflatten) or node.target is torch.Size)


def _is_mode(node: fx.Node) -> bool:
    return bool(node.meta.get("effect")) and _name(node) in _MODES


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _modules(node: fx.Node) -> Iterator[str]:
    if node.op == "call_module":
        yield str(node.target)
    elif isinstance(node.target, Product):
        yield node.target.path


def _number(size: Any) -> Any:
    return int(size) if getattr(size, "is_Integer", False) else size
