"""Regions: some nodes of a graph become one node, with the same numbers and gradients; what cannot is refused."""

import copy
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fx_graphs import Block, between, graph_of, named, numbers, straight
from partbook.core.errors import Problem
from partbook.core.tracing.code import code_of, compile_graph
from partbook.core.tracing.fused import checkpointed, grouped
from partbook.core.tracing.region import carve, cut_out, outputs_of, problems_of, self_of


def calls(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op.startswith("call")]


def test_text_takes_self_once_and_keeps_it_after_its_last_use_as_an_argument() -> None:
    graph = fx.Graph()
    me, x = graph.placeholder("self"), graph.placeholder("x")
    other = graph.call_function(torch.add, (x, 1))
    region = graph.call_function(grouped("first")(cut_out(graph, [other], [other])[0]), (me, x))
    graph.output([graph.call_function(F.linear, (region, graph.get_attr("up.weight")))])
    function = compile_graph(graph, "block")
    block = Block()
    assert function.__partbook_source__ == code_of(graph, "other label").text
    assert function.__partbook_source__.startswith("def forward(self, x):\n")
    torch.testing.assert_close(function(block, torch.ones(8)), [F.linear(torch.full((8,), 2.0), block.up.weight)])


def test_traceback_shows_the_generated_line() -> None:
    graph = fx.Graph()
    graph.placeholder("self")
    graph.output(graph.call_function(torch.matmul, (graph.placeholder("x"), graph.placeholder("x_1"))))
    with pytest.raises(RuntimeError) as caught:
        compile_graph(graph, "h.0.mlp")(None, torch.ones(2, 3), torch.ones(2, 3))
    text = "".join(traceback.format_exception(caught.value))
    assert "<partbook h.0.mlp " in text
    assert "matmul = torch.matmul(x, x_1)" in text


def test_code_is_equal_for_equal_parts_of_different_graphs() -> None:
    first, second = graph_of(Block()), graph_of(Block(nn.ReLU()))
    parts = [cut_out(graph, *[named(graph, "softmax", "dropout")] * 2)[0] for graph in (first, second)]
    assert code_of(parts[0], "a") == code_of(parts[1], "b")
    assert hash(code_of(parts[0], "a")) == hash(code_of(parts[1], "b"))


@pytest.mark.parametrize("region_of", [grouped("fused"), checkpointed("kept")], ids=["grouped", "checkpoint"])
@pytest.mark.parametrize(("first", "last"), [("softmax", "dropout"), ("up", "norm"), ("drop", "view_1")])
def test_numbers_are_bitwise_those_of_the_plain_graph(region_of, first: str, last: str) -> None:
    block = Block().double()
    plain, graph = graph_of(block), graph_of(block)
    nodes = between(graph, first, last)
    outputs = outputs_of(graph, nodes)
    assert not list(problems_of(graph, nodes, outputs))
    carve(graph, nodes, outputs, region_of)
    graph.lint()
    assert len(calls(graph)) < len(calls(plain))
    for expected, found in zip(numbers(plain, block), numbers(graph, block), strict=True):
        assert torch.equal(expected, found)


def test_uses_of_an_output_in_between_move_behind_the_region() -> None:
    """The three projections of an attention, whose views stand between them."""

    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.q(x).view(-1, 4) * 2, self.k(x + rest).view(-1, 4), self.v(rest)

    module = Projections().double()
    plain, graph = graph_of(module), graph_of(module)
    nodes = named(graph, "q", "k", "v")
    assert not list(problems_of(graph, nodes, nodes))
    node = carve(graph, nodes, nodes, grouped("qkv"))
    graph.lint()
    assert calls(graph) == ["add", "qkv", "getitem", "getitem_1", "getitem_2", "view", "mul", "view_1"]
    assert node.meta["where"] == "model.py:9"
    for expected, found in zip(numbers(plain, module), numbers(graph, module), strict=True):
        assert torch.equal(expected, found)


def test_region_is_shared_by_copies_of_the_model() -> None:
    graph = graph_of(Block())
    region = carve(graph, named(graph, "softmax"), named(graph, "softmax"), grouped("one")).target
    assert copy.deepcopy(region) is region
    assert copy.deepcopy({"graph": graph})["graph"].find_nodes(op="call_function", target=region)
    assert repr(region) == "grouped region 'one'"


def refused(found: str, hint: str) -> list[Problem]:
    return [Problem(found, hint)]


TAKE_B = "take 'b' in, or only nodes on one side of it"
BETWEEN = "'b' (m.py:3) lies between the nodes and can run neither before nor after all of them: "


@pytest.mark.parametrize(
    ("change", "nodes", "outputs", "expected"),
    [
        (
            {},
            "xac",
            "c",
            refused("'x' is an input of the graph, not an operation", "leave it out of the nodes"),
        ),
        (
            {},
            ["output"],
            "",
            [
                Problem("'output' is the output of the graph, not an operation", "leave it out of the nodes"),
                Problem("there is no operation among the nodes", "name at least one"),
            ],
        ),
        (
            {},
            "ab",
            "b",
            refused(
                "'a' (m.py:2) is used outside, by 'c' (m.py:4), and is not an output",
                "return it as well, or take 'c' in",
            ),
        ),
        (
            {"b": ("a",), "c": ("b",)},
            "ac",
            "ac",
            refused(BETWEEN + "'b' uses 'a', 'c' uses 'b'", TAKE_B),
        ),
        (
            {"b": ("a",), "mutates": {"b": [1]}, "c": ("x",)},
            "ac",
            "ac",
            refused(BETWEEN + "'b' uses 'a', 'c' uses what 'b' writes in place to", TAKE_B),
        ),
        (
            {"mutates": {"b": [1], "c": [1]}},
            "ac",
            "ac",
            refused(BETWEEN + "'b' writes in place to what 'a' uses, 'c' writes in place to what 'b' uses", TAKE_B),
        ),
        (
            {"effect": {"b": True}},
            "ac",
            "c",
            refused(BETWEEN + "'b' changes what 'a' runs under, 'b' changes what 'c' runs under", TAKE_B),
        ),
        (
            {"random": dict.fromkeys("abc", True)},
            "ac",
            "c",
            refused(
                BETWEEN + "'a' and 'b' draw random numbers, in this order, 'b' and 'c' draw random numbers, in this "
                "order",
                TAKE_B,
            ),
        ),
    ],
)
def test_refusals_name_the_nodes_and_change_nothing(change, nodes, outputs, expected) -> None:
    graph, by_name = straight()
    for name in "bc":
        if name in change:
            by_name[name].args = tuple(by_name[each] for each in change[name])
    for key in ("mutates", "effect", "random"):
        for name, value in change.get(key, {}).items():
            by_name[name].meta[key] = value
    before = str(graph)
    assert list(problems_of(graph, [by_name[n] for n in nodes], [by_name[n] for n in outputs])) == expected
    assert str(graph) == before


@pytest.mark.parametrize(
    "meta", [{"b": {"mutates": [1]}}, {"a": {"random": True}, "b": {"random": True}}, {"b": {"effect": True}}]
)
def test_what_can_run_on_one_side_is_no_problem(meta) -> None:
    """Only the first of two nodes must stay before ``b``, so ``b`` runs behind the region."""
    graph, by_name = straight()
    by_name["c"].args = (by_name["a"], 1)
    by_name["c"].meta["kind"] = "sym"
    for name, values in meta.items():
        by_name[name].meta.update(values)
    nodes = [by_name["a"], by_name["c"]]
    assert not list(problems_of(graph, nodes))
    node = carve(graph, nodes, nodes[1:], grouped("both"))
    assert node.next is by_name["b"]


def test_nodes_that_nobody_uses_are_refused() -> None:
    graph, by_name = straight()
    with graph.inserting_after(by_name["c"]):
        unused = graph.call_function(torch.tan, (by_name["c"],))
    [problem] = problems_of(graph, [unused])
    assert problem == Problem("nothing outside uses what 'tan' gives", "take in what uses it, or leave it out")


def test_meta_of_the_new_node_is_that_of_all_its_nodes() -> None:
    graph, by_name = straight()
    by_name["a"].meta.update(random=True, mutates=[7], val="A")
    by_name["c"].meta.update(mutates=[7, 8], val="C", effect=True)
    node = carve(graph, [by_name["a"], by_name["c"]], [by_name["c"]], grouped("both"))
    assert node.meta == {
        "val": "C", "storage": 4, "random": True, "mutates": [7, 8], "effect": True, "where": "m.py:4",
    }  # fmt: skip
    assert node.args == (self_of(graph), by_name["x"])
