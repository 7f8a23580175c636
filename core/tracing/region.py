"""Turn some nodes of a graph into one node: why that may not be possible, and how it is done."""

from __future__ import annotations

import builtins
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any

from torch import fx

from ..errors import Problem

# Names that generated text uses for itself: an argument would hide them.
_FX_NAMES = ("torch", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree")


class Region:
    """What some nodes of a graph became: the target of one call_function node, called as ``region(self, *inputs)``.

    It gives the single output or a tuple of outputs. It holds no module and no parameter, so a copied model shares it.
    ``graph`` is what it computes, ``attributes`` are names of parameters of ``self`` that it takes behind its inputs,
    ``inlined`` the paths of modules that it computes itself: what is changed on these later does not reach it.
    """

    def __init__(
        self,
        kind: str,
        label: str,
        graph: fx.Graph,
        run: Callable[..., Any],
        *,
        path: str = "",
        attributes: tuple[str, ...] = (),
        inlined: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.label, self.path = kind, label, path
        self.graph, self.attributes, self.inlined = graph, attributes, inlined
        self._run = run
        # fx makes the name of the node, and the one in the generated text, of these.
        self.__name__, self.__module__ = label, "region"

    def __call__(self, owner: Any, *inputs: Any) -> Any:
        try:
            return self._run(owner, *inputs)
        except Exception as error:
            error.add_note(f"in {self!r}")
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def __repr__(self) -> str:
        return f"{self.kind} region {self.label!r}{f' of {self.path!r}' if self.path else ''}"


def problems_of(
    graph: fx.Graph, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node] | None = None
) -> Iterator[Problem]:
    """Why ``nodes`` cannot become one node. ``outputs``: the values that it gives; by default all that others use."""
    ends = [node for node in nodes if node.op in ("placeholder", "output")]
    for node in ends:
        what = "an input" if node.op == "placeholder" else "the output"
        yield Problem(f"{node.name!r} is {what} of the graph, not an operation", "leave it out of the nodes")
    inside = _inside(graph, nodes)
    if not inside:
        yield Problem("there is no operation among the nodes", "name at least one")
    if ends or not inside:
        return
    used = outputs_of(graph, nodes)
    if not used:
        yield Problem(f"nothing outside uses what {inside[-1].name!r} gives", "take in what uses it, or leave it out")
    if outputs is not None:
        for node in used:
            if node not in outputs:
                user = next(user for user in node.users if user not in inside)
                yield Problem(
                    f"{describe(node)} is used outside, by {describe(user)}, and is not an output",
                    f"return it as well, or take {user.name!r} in",
                )
    _, breaks = _arrange(graph, inside)
    for node, clauses in breaks.items():
        yield Problem(
            f"{describe(node)} lies between the nodes and can run neither before nor after all of them: "
            + ", ".join(clauses),
            f"take {node.name!r} in, or only nodes on one side of it",
        )


def outputs_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes`` whose values others use, in the order of the graph."""
    inside = _inside(graph, nodes)
    return [node for node in inside if any(user not in inside for user in node.users)]


def cut_out(
    graph: fx.Graph, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
    """A graph of copies of ``nodes``, and the nodes of ``graph`` that give its inputs; ``graph`` stays as it is.

    Names come from what the copies do, not from the originals: equal parts of a model give equal text.
    """
    part = fx.Graph()
    me = self_of(graph)
    copies = {me: part.placeholder("self")}
    inside = _inside(graph, nodes)
    used = dict.fromkeys(each for node in inside for each in node.all_input_nodes)
    inputs = tuple(each for each in used if each not in inside and each is not me)
    taken = {"self", *_FX_NAMES}
    for node in inputs:
        name = _unused(_hint(node), taken)
        copies[node] = part.placeholder(name)
        copies[node].meta = dict(node.meta)
        if node.target is getattr:
            copies[node].meta["reads"] = node.args[1]
    for node in inside:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = part.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    results = tuple(copies[node] for node in outputs)
    part.output(results[0] if len(results) == 1 else results)
    return part, inputs


def carve(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    region_of: Callable[[fx.Graph], Region],
) -> fx.Node:
    """Put one call of a region in the place of ``nodes``, after a clean ``problems_of``; gives the new node.

    ::

        mul = x * 2                           mul_relu = region_mul_relu(self, x)
        other = x + 1         ---->           other = x + 1
        relu = mul.relu()

    It stands where the last of the nodes stood; what uses its outputs moves behind it.
    """
    inside = _inside(graph, nodes)
    outputs = list(dict.fromkeys(outputs))
    later, breaks = _arrange(graph, inside)
    assert outputs, "a region without a result"
    assert not breaks, breaks
    part, inputs = cut_out(graph, nodes, outputs)
    region = region_of(part)
    attributes = [parameter(graph, name) for name in region.attributes]
    with graph.inserting_after(inside[-1]):
        call = graph.call_function(region, (self_of(graph), *inputs, *attributes))
    call.meta = _meta(inside, outputs)
    cursor = call
    for i, output in enumerate(outputs):
        value = call
        if len(outputs) > 1:
            with graph.inserting_after(cursor):
                value = cursor = graph.call_function(operator.getitem, (call, i))
            value.meta = {k: v for k, v in output.meta.items() if k not in ("random", "mutates", "effect")}
        output.replace_all_uses_with(value)
    for node in later:
        cursor.append(node)
        cursor = node
    for node in reversed(inside):
        graph.erase_node(node)
    return call


def self_of(graph: fx.Graph) -> fx.Node:
    """The placeholder of the traced module."""
    first = next(iter(graph.nodes))
    assert (first.op, first.target) == ("placeholder", "self")
    return first


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number computed from sizes, not a tensor."""
    return node.meta.get("kind") == "sym" or "size" in node.meta


def describe(node: fx.Node) -> str:
    """The node's name and the user's line that it comes from."""
    where = node.meta.get("where")
    return f"{node.name!r} ({where})" if where else repr(node.name)


def _inside(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The operations among ``nodes`` in the order of the graph. Parameters are read outside and passed in."""
    assert all(node.graph is graph for node in nodes)
    chosen = {node for node in nodes if node.op not in ("placeholder", "output", "get_attr")}
    return [node for node in graph.nodes if node in chosen]


def _arrange(graph: fx.Graph, inside: list[fx.Node]) -> tuple[list[fx.Node], dict[fx.Node, list[str]]]:
    """The nodes between those of ``inside`` that must run after all of them, and those that would have to run in
    between, with the reasons. All others can run before."""
    chosen, last = set(inside), inside[-1]
    # node -> the one that it must follow, and why
    later: dict[fx.Node, tuple[fx.Node, str]] = {}
    breaks: dict[fx.Node, list[str]] = {}
    passed: list[fx.Node] = []
    node = inside[0]
    while True:
        if node in chosen:
            for other in later:
                if clause := _must_follow(node, other):
                    clauses = [clause]
                    while other not in chosen:
                        first, (other, clause) = other, later[other]
                        clauses.insert(0, clause)
                    breaks.setdefault(first, clauses)
            passed.append(node)
        else:
            for other in passed:
                if clause := _must_follow(node, other):
                    later[node] = other, clause
                    passed.append(node)
                    break
        if node is last:
            return list(later), breaks
        node = node.next


def _must_follow(later: fx.Node, earlier: fx.Node) -> str:
    """Why ``later`` must stay behind ``earlier``, "" where they can change places."""
    a, b = repr(earlier.name), repr(later.name)
    if earlier in later.all_input_nodes:
        return f"{b} uses {a}"
    if earlier.meta.get("random") and later.meta.get("random"):
        return f"{a} and {b} draw random numbers, in this order"
    for mode, under, other in ((earlier, later, b), (later, earlier, a)):
        if mode.meta.get("effect") and not _is_plain_read(under):
            return f"{mode.name!r} changes what {other} runs under"
    if _writes(later) & (_reads(earlier) | _writes(earlier)):
        return f"{b} writes in place to what {a} uses"
    if _writes(earlier) & _reads(later):
        return f"{b} uses what {a} writes in place to"
    return ""


def _is_plain_read(node: fx.Node) -> bool:
    """Whether gradient mode, autocast and the like make no difference to the node."""
    return node.op in ("get_attr", "placeholder") or (is_size(node) and not isinstance(node.target, Region))


def _writes(node: fx.Node) -> set[Any]:
    return set(node.meta.get("mutates") or ())


def _reads(node: fx.Node) -> set[Any]:
    return {each.meta["storage"] for each in node.all_input_nodes if "storage" in each.meta}


def _hint(node: fx.Node) -> str:
    if node.op == "get_attr":
        name = str(node.target).rpartition(".")[2]
        return name if name.isidentifier() and not iskeyword(name) and not hasattr(builtins, name) else "x"
    return "size" if is_size(node) else "x"


def _unused(hint: str, taken: set[str]) -> str:
    names = (f"{hint}_{i}" if i else hint for i in itertools.count())
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def _meta(inside: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[str, Any]:
    """What is known about the one node that does all that ``inside`` did."""
    meta: dict[str, Any] = (
        dict(outputs[0].meta) if len(outputs) == 1 else {"val": tuple(each.meta.get("val") for each in outputs)}
    )
    meta["random"] = any(node.meta.get("random") for node in inside)
    meta["mutates"] = list(dict.fromkeys(key for node in inside for key in node.meta.get("mutates") or ()))
    meta["effect"] = any(node.meta.get("effect") for node in inside)
    meta["where"] = inside[-1].meta.get("where", "")
    return meta


def parameter(graph: fx.Graph, name: str) -> fx.Node:
    """The node that reads parameter ``name``, in front of all operations."""
    front = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == name:
            if node is not front:
                front.prepend(node)
            return node
    with graph.inserting_before(front):
        return graph.get_attr(name)
