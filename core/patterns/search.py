"""Search a graph for the subgraphs that a pattern describes.

The matcher is our own: torch.fx's SubgraphMatcher compares targets and positions, so it knows neither that two
spellings are one operation nor modules' functional twins, and it does not try commutative operands in both orders.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ..execution import original_class
from .operation import MISSING, Attribute, Operation, Signature, equal_literals
from .pattern import ModuleCall, Pattern, matches_glob, size_nodes, traced
from .twins import AnyTensor, different_setting, name_of_node, operation_of_node
from .values import facing_parts, path_of, same_size, show, show_place

# the value for each node of the pattern, and the value that a match relies on for training flags
Bound = dict[fx.Node | Attribute, Any]
# How many steps a report may take: it need not be about the very nearest miss.
_STEPS_OF_A_REPORT = 20_000
# (what the pattern has, what the graph has there, the place in words)
Goal = tuple[Any, Any, str]


@dataclass(frozen=True)
class Found:
    """One match of a pattern.

    ``nodes`` are the matched nodes in graph order, together with the computations on sizes that feed only them.
    ``inputs`` is what each argument of the pattern stands for: a node, a constant, an ``Attribute`` (a parameter of a
    matched module), or a tuple, list or slice of those where the argument stands for a whole one. ``outputs`` are the
    nodes of the results. Inputs and outputs are in the order of the pattern function.

    ``modes`` are the training flags that a constant of the pattern agreed with, as they were during the search: what
    replaces the match is right for these only, although the graph may serve both modes.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[fx.Node, ...]
    modes: tuple[tuple[Attribute, bool], ...] = ()


def find_pattern(graph: fx.Graph, owner: nn.Module, pattern: Callable[..., Any]) -> list[Found]:
    """The matches of ``pattern`` in ``graph``, which ``owner`` runs, in graph order; where two overlap, the first.

    Every argument of the pattern matches any one node or constant, the same one wherever it stands, also where it has
    a default. Everything else matches what is equal to it. A subgraph of which an intermediate value is used elsewhere
    is no match. Raises PatternError for a function that is no pattern.
    """
    return list(_Search(graph, owner, traced(pattern)).run())


def nearest_miss(graph: fx.Graph, owner: nn.Module, pattern: Callable[..., Any]) -> str:
    """What stopped the partial match that came furthest, for the error about a pattern that does not match."""
    search = _Search(graph, owner, traced(pattern), explain=True)
    if list(search.run()):
        return "the pattern matches"
    return search.miss()


class _Search:
    def __init__(self, graph: fx.Graph, owner: nn.Module, pattern: Pattern, explain: bool = False) -> None:
        self.graph, self.owner, self.pattern, self.explain = graph, owner, pattern, explain
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.sizes = size_nodes(graph)
        # Computations on sizes are conditions and not nodes of the match: a traced graph writes them in its own way.
        self.operators = [node for node in pattern.operations if node not in pattern.sizes]
        self.taken: set[fx.Node] = set()
        self._best = (0, "")
        self._steps = 0

    def run(self) -> Iterator[Found]:
        first, *others = self.pattern.sinks
        for node in self.graph.nodes:
            if node in self.taken or not self._may_match(first, node):
                continue
            solutions = self._solve([(first, node, f"%{node.name}")], {}, others)
            found = next(filter(None, map(self._accept, solutions)), None)
            if found is not None:
                yield found

    def miss(self) -> str:
        matched, text = self._best
        if matched:
            return f"the nearest miss has {matched} of {len(self.operators)} operations: {text}"
        if self.pattern.operations[self.pattern.sinks[0]] is None:
            names = {node.target for node in self.graph.nodes if node.op == "call_module"}
        else:
            names = {name_of_node(node, self.owner) for node in self.graph.nodes if node not in self.sizes}
        known = sorted(name for name in names if isinstance(name, str))
        return f"no node of the graph is the pattern's {self._words(self.pattern.sinks[0])}; there are {known}"

    def _solve(self, goals: list[Goal], bound: Bound, sinks: list[fx.Node]) -> Iterator[Bound]:
        """Every way to extend ``bound``, which is this call's own, so that all goals hold."""
        while goals:
            goals.sort(key=self._urgency)
            alternatives = self._step(*goals.pop(), bound)
            self._steps += 1
            if not alternatives or (self.explain and self._steps > _STEPS_OF_A_REPORT):
                return
            *others, last = alternatives
            for more in others:
                yield from self._solve([*goals, *more], dict(bound), sinks)
            goals += last
        if not sinks:
            yield bound
            return
        candidates = [node for node in self._candidates(sinks[0], bound) if self._may_match(sinks[0], node)]
        for node in candidates:
            yield from self._solve([(sinks[0], node, f"%{node.name}")], dict(bound), sinks[1:])
        if not candidates:
            self._fail(bound, f"nothing beside it is the pattern's {self._words(sinks[0])}")

    def _urgency(self, goal: Goal) -> int:
        """Which goal is next: first what may fail, but in a report structure before values, so that a near miss comes
        far. Sizes are last, when their tensors are known."""
        wanted = goal[0]
        if isinstance(wanted, fx.Node) and wanted.op == "placeholder":
            return 2 if self.explain else 4
        if isinstance(wanted, fx.Node):
            return 0 if wanted in self.pattern.sizes else 3
        return 3 if isinstance(wanted, tuple | list | slice | dict) else 1

    def _step(self, wanted: Any, value: Any, place: str, bound: Bound) -> list[list[Goal]]:
        """The goals that remain once ``wanted`` faces ``value``, one list for each way; none where it cannot."""
        if isinstance(wanted, fx.Node) and wanted in bound:
            if self._same(bound[wanted], value):
                return [[]]
            return self._fail(bound, f"{place} is {show(value)}, the pattern has {show(bound[wanted])} there again")
        if value is MISSING:
            return self._fail(bound, f"{place} is left out, the pattern has {self._words(wanted)}")
        if wanted is MISSING:
            return self._fail(bound, f"{place} is {show(value)}, the pattern leaves it out")
        if isinstance(wanted, fx.Node):
            if wanted.op == "placeholder":
                bound[wanted] = value
                return [[]]
            step = self._size if wanted in self.pattern.sizes else self._call
            return step(wanted, value, place, bound)
        parts = facing_parts(wanted, value)
        if parts is not None:
            return [[(a, b, place) for a, b in parts]]
        if isinstance(value, Attribute) and equal_literals(wanted, self._read(value.path)):
            bound[value] = wanted
            return [[]]
        if equal_literals(wanted, value) or (isinstance(wanted, AnyTensor) and self._shape(value) == wanted.shape):
            return [[]]
        return self._fail(bound, f"{place} is {show(value)}, the pattern has {self._words(wanted)}")

    def _call(self, wanted: fx.Node, node: Any, place: str, bound: Bound) -> list[list[Goal]]:
        if not isinstance(node, fx.Node) or not self._may_match(wanted, node):
            return self._fail(bound, f"{place} is {self._describe(node)}, the pattern has {self._words(wanted)}")
        if node in self.taken or any(bound.get(other) is node for other in self.operators):
            return self._fail(bound, f"{show(node)} is part of a match already")
        # An intermediate value is used by the match alone. Found out early, unless the report wants it found out last.
        if not self.explain and wanted not in self.pattern.outputs and self._users(node) != self.pattern.users(wanted):
            return []
        bound[wanted] = node
        return self._arguments(wanted, node, bound)

    def _users(self, node: fx.Node) -> int:
        return sum(user not in self.sizes for user in node.users)

    def _size(self, wanted: fx.Node, value: Any, place: str, bound: Bound) -> list[list[Goal]]:
        known = self._evaluate(wanted, bound)
        if known is not None and same_size(known, value):
            return [[]]
        if not isinstance(value, fx.Node) or value not in self.sizes or not self._may_match(wanted, value):
            return self._fail(bound, f"{place} is {self._describe(value)}, the pattern has {self._words(wanted)}")
        bound[wanted] = value
        return self._arguments(wanted, value, bound)

    def _evaluate(self, wanted: fx.Node, bound: Bound) -> Any:
        """The size that a computation of the pattern gives in the graph; None where the graph does not tell."""
        operation = self.pattern.operations[wanted]
        assert operation is not None
        if operation.name == "size":
            shape = self._shape(bound.get(operation.arguments["input"]))
            dim = operation.arguments.get("dim")
            if shape is None or dim is None:
                return shape
            return shape[dim] if isinstance(dim, int) and -len(shape) <= dim < len(shape) else None
        args = [self._evaluate(arg, bound) if isinstance(arg, fx.Node) else arg for arg in wanted.args]
        target: Any = wanted.target
        return None if any(arg is None for arg in args) else target(*args)

    def _shape(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, fx.Node) and value.op != "get_attr":
            tensor = value.meta.get("val")
        else:
            path = path_of(value) if isinstance(value, fx.Node | Attribute) else None
            tensor = self._read(path) if path else None
        return tuple(tensor.shape) if isinstance(tensor, Tensor) else None

    def _read(self, path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(self.owner.get_submodule(module), name)

    def _may_match(self, wanted: fx.Node, node: fx.Node) -> bool:
        """Whether the two are one operation, whatever its arguments are."""
        operation = self.pattern.operations[wanted]
        if operation is not None:
            return bool(operation.name == name_of_node(node, self.owner))
        if node.op != "call_module":
            return False
        which, path = _which(wanted), str(node.target)
        if isinstance(which, str):
            return matches_glob(path, which)
        return original_class(which) is original_class(self.owner.get_submodule(path))

    def _arguments(self, wanted: fx.Node, node: fx.Node, bound: Bound) -> list[list[Goal]]:
        """The ways in which the arguments of two calls of one operation can face each other."""
        ours = self.pattern.operations[wanted]
        theirs = operation_of_node(node, self.owner) if ours is not None else None
        if ours is None:
            module, which = self.owner.get_submodule(str(node.target)), _which(wanted)
            different = "" if isinstance(which, str) else different_setting(which, module)
            if different:
                return self._fail(bound, f"{show_place(node)} differs in {different!r} from the pattern's")
            if not isinstance(which, str):
                bound[Attribute(f"{node.target}.training")] = module.training
            ours, theirs = (_call_of_module(module, call) for call in (wanted, node))
        assert theirs is not None
        orders = [theirs]
        if ours.is_commutative() and theirs.is_commutative() and not _is_symmetric(ours):
            orders.append(theirs.swapped())
        place = show_place(node)
        goals = [[(a, b, f"argument {name!r} of {place}") for name, a, b in ours.facing(order)] for order in orders]
        possible = [way for way in goals if not any(map(_clash, way))]
        # The report goes on with the way that comes further.
        return possible or ([min(goals, key=lambda way: sum(map(_clash, way)))] if self.explain else [])

    def _same(self, a: Any, b: Any) -> bool:
        """Whether two values of the graph are one, also where it has several nodes for a parameter or a size."""
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b:
            if a.op == b.op == "get_attr":
                return a.target == b.target
            if not {a, b} <= self.sizes:
                return False
            ours, theirs = operation_of_node(a, self.owner), operation_of_node(b, self.owner)
            assert ours is not None
            assert theirs is not None
            return ours.name == theirs.name and all(self._same(x, y) for _, x, y in ours.facing(theirs))
        if isinstance(a, fx.Node | Attribute) and isinstance(b, fx.Node | Attribute):
            return a is b or path_of(a) == path_of(b) is not None
        parts = facing_parts(a, b)
        return equal_literals(a, b) if parts is None else all(self._same(x, y) for x, y in parts)

    def _candidates(self, sink: fx.Node, bound: Bound) -> list[fx.Node]:
        """Where a further result of the pattern may be: down from what it has in common with the others."""
        ways: list[tuple[fx.Node, ...]] = [(sink,)]
        seen = set(self.pattern.sizes)
        for way in ways:
            for source in way[0].all_input_nodes:
                if isinstance(bound.get(source), fx.Node):
                    reached = {bound[source]}
                    for _ in way:
                        reached = {user for node in reached for user in node.users}
                    return sorted(reached, key=self.order.__getitem__)
                if source not in seen:
                    seen.add(source)
                    ways.append((source, *way))
        return list(self.graph.nodes)

    def _accept(self, bound: Bound) -> Found | None:
        """The match, unless it cannot be taken out of the graph."""
        inside = {bound[node] for node in self.operators}
        inputs = tuple(bound[node] for node in self.pattern.inputs)
        used: set[fx.Node] = set()
        map_arg(inputs, used.add)
        for node in used & inside:
            self._fail(bound, f"{show(node)} would be an input and an intermediate value at once")
            return None
        nodes = self._with_sizes(inside, used)
        for wanted in self.operators:
            for user in bound[wanted].users:
                if user not in nodes and wanted not in self.pattern.outputs:
                    self._fail(
                        bound, f"the intermediate value {show(bound[wanted])} is also used by {show_place(user)}"
                    )
                    return None
        if len(self.pattern.outputs) > 1 and self._depends(used, inside):
            self._fail(bound, "an input of the match is computed from one of its results")
            return None
        self.taken |= inside
        in_order = tuple(sorted(nodes, key=self.order.__getitem__))
        modes = tuple((key, value) for key, value in bound.items() if isinstance(key, Attribute))
        return Found(in_order, inputs, tuple(bound[node] for node in self.pattern.outputs), modes)

    def _with_sizes(self, inside: set[fx.Node], used: set[fx.Node]) -> set[fx.Node]:
        """``inside`` and the sizes next to it that nothing else uses."""

        def belongs(node: fx.Node) -> bool:
            return node in inside or (node in self.sizes and node not in used and all(map(belongs, node.users)))

        nodes, pending = set(inside), list(inside)
        for node in pending:
            new = [near for near in (*node.users, *node.all_input_nodes) if near not in nodes and belongs(near)]
            nodes.update(new)
            pending += new
        return nodes

    def _depends(self, nodes: set[fx.Node], on: set[fx.Node]) -> bool:
        first = min(self.order[node] for node in on)
        pending = [node for node in nodes if self.order[node] > first]
        seen = set(pending)
        for node in pending:
            if node in on:
                return True
            new = [source for source in node.all_input_nodes if self.order[source] >= first and source not in seen]
            seen.update(new)
            pending += new
        return False

    def _fail(self, bound: Bound, text: str) -> list[list[Goal]]:
        matched = sum(node in bound for node in self.operators) if self.explain else 0
        if matched > self._best[0]:
            self._best = (matched, text)
        return []

    def _words(self, wanted: Any) -> str:
        """A value of the pattern for a message."""
        if not isinstance(wanted, fx.Node):
            return f"a parameter of shape {wanted.shape}" if isinstance(wanted, AnyTensor) else repr(wanted)
        if wanted.op == "placeholder":
            return wanted.name
        operation = self.pattern.operations[wanted]
        name = wanted.target if operation is None else operation.name
        return str(name if isinstance(name, str | ModuleCall) else getattr(name, "__name__", name))

    def _describe(self, value: Any) -> str:
        """A value of the graph for a message, with the operation that makes it."""
        name = name_of_node(value, self.owner) if isinstance(value, fx.Node) else None
        return f"{show(value)}, a {name}" if isinstance(name, str) else show(value)


def _which(wanted: fx.Node) -> str | nn.Module:
    assert isinstance(wanted.target, ModuleCall)
    return wanted.target.which


def _call_of_module(module: nn.Module, node: fx.Node) -> Operation:
    signature = Signature(inspect.signature(original_class(module).forward))
    # the first argument of the signature is self
    bound = signature.bind((None, *node.args), node.kwargs)
    return Operation(None, bound or {"*": node.args, **node.kwargs}, signature.defaults)


def _is_symmetric(operation: Operation) -> bool:
    """Whether swapping the operands of a pattern's operation changes nothing but which argument is which."""
    operands = [operation.arguments[name] for name in ("input", "other")]
    return all(isinstance(node, fx.Node) and node.op == "placeholder" and len(node.users) == 1 for node in operands)


def _clash(goal: Goal) -> bool:
    """Whether two values cannot agree, as far as a first look tells."""
    wanted, value, _ = goal
    if wanted is MISSING or value is MISSING:
        return True
    if isinstance(wanted, fx.Node):
        return False
    if isinstance(wanted, tuple | list | slice | dict | AnyTensor):
        return False
    return not isinstance(value, Attribute) and (isinstance(value, fx.Node) or not equal_literals(wanted, value))
