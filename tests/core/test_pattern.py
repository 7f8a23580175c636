"""Which subgraphs a pattern matches, which it does not, and what the errors say."""

import operator
import time

import pytest
import torch
from torch.nn import functional as F

from leaf_graphs import found, graph_of, missed, names, shown
from partbook.core.patterns import find_pattern, module, nearest_miss


def test_chain_with_its_inputs_in_the_order_of_the_signature():
    def pattern(mask, scores):
        return torch.softmax(scores + mask, dim=-1)

    def model(a, b, c):
        return torch.matmul(torch.softmax(torch.matmul(a, b) + c, dim=-1), a)

    assert shown(found(model, pattern)) == [(["add", "softmax"], ["c", "matmul"], ["softmax"])]


def test_every_place_is_found_in_graph_order():
    matches = found(lambda x, y: (torch.tanh(x * 2), torch.tanh(y * 2), torch.tanh(x + 2)), lambda a: torch.tanh(a * 2))
    assert shown(matches) == [(["mul", "tanh"], ["x"], ["tanh"]), (["mul_1", "tanh_1"], ["y"], ["tanh_1"])]


def test_of_overlapping_places_the_first_is_the_match():
    assert [names(match.nodes) for match in found(lambda x: ((((x + 1) + 1) + 1) + 1) + 1, lambda a: (a + 1) + 1)] == [
        ["add", "add_1"],
        ["add_2", "add_3"],
    ]


def test_intermediate_value_that_is_used_elsewhere_is_no_match():
    pattern = lambda a, b: torch.relu(a + b)  # noqa: E731

    def model(x, y):
        h = x + y
        return torch.relu(h), h * 2

    assert missed(model, pattern).endswith("the intermediate value %add is also used by %mul")
    assert "also used by %output" in missed(lambda x, y: (torch.relu(h := x + y), h), pattern)
    # as a result of the pattern it may be
    assert len(found(model, lambda a, b: (h := a + b, torch.relu(h)))) == 1
    # and what goes into the match may be used anywhere
    assert len(found(lambda x, y: (torch.relu(x + y), x * y), pattern)) == 1


def test_leak_does_not_hide_a_match_with_the_operands_in_the_other_order():
    """relu(x) feeds both sides; only in one order is the relu of the pattern the one that nothing else uses."""

    def model(x, y):
        h = torch.relu(x)
        return torch.relu(y) + h, h

    def mirrored(x, y):
        h = torch.relu(x)
        return h + torch.relu(y), h

    for function in (model, mirrored):
        assert shown(found(function, lambda a, b: torch.relu(a) + b)) == [(["relu_1", "add"], ["y", "relu"], ["add"])]


def test_size_of_an_intermediate_value_used_elsewhere_is_a_leak():
    def model(x, y):
        h = x + y
        return torch.relu(h), y.view(h.size(0), -1)

    assert "the intermediate value %add is also used by %size" in missed(model, lambda a, b: torch.relu(a + b))


@pytest.mark.parametrize(
    ("pattern", "model", "inputs"),
    [
        (lambda a, b: torch.relu(a) + b, lambda x, y: y + torch.relu(x), ["x", "y"]),
        (lambda a: a * 0.5, lambda x: 0.5 * x, ["x"]),
        (lambda a: torch.relu(a * 0.5) * (1 + a), lambda x: (x + 1) * torch.relu(0.5 * x), ["x"]),
        (lambda a, b: torch.maximum(torch.tanh(a), b), lambda x, y: torch.maximum(y, torch.tanh(x)), ["x", "y"]),
        (lambda a, b: torch.tanh(a) & b, lambda x, y: torch.bitwise_and(y, torch.tanh(x)), ["x", "y"]),
        (lambda a, b: torch.tanh(a) == b, lambda x, y: y == torch.tanh(x), ["x", "y"]),
        # the first order fits the first operand, and only the second one fits all
        (
            lambda a, b, c: torch.relu(a + b) * torch.tanh(a + c),
            lambda x, y, z: torch.tanh(z + y) * torch.relu(x + y),
            ["y", "x", "z"],
        ),
    ],
)
def test_commutative_operands_match_in_either_order(pattern, model, inputs):
    assert [names(match.inputs) for match in found(model, pattern)] == [inputs]


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        (lambda a, b: torch.relu(a) - b, lambda x, y: y - torch.relu(x)),
        (lambda a, b: torch.relu(a) / b, lambda x, y: y / torch.relu(x)),
        (lambda a, b: torch.relu(a) @ b, lambda x, y: y @ torch.relu(x)),
        (lambda a: a**2, lambda x: 2**x),
        (lambda a, b: torch.add(torch.relu(a), b, alpha=2), lambda x, y: torch.add(y, torch.relu(x), alpha=2)),
    ],
)
def test_other_operands_do_not(pattern, model):
    assert found(model, pattern) == []


@pytest.mark.parametrize(
    ("in_pattern", "in_graph"),
    [
        (lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, dim=-1)),
        (lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(dim=-1)),
        (lambda x: x.softmax(-1), lambda x: torch.softmax(x, dim=-1, dtype=None)),
        (lambda x: F.softmax(x, -1, dtype=torch.float32), lambda x: torch.softmax(x, -1, torch.float32)),
        (lambda x: torch.matmul(x, x), lambda x: x @ x),
        (lambda x: x.matmul(x), lambda x: torch.matmul(x, other=x)),
        (lambda x: x + 1, lambda x: torch.add(x, 1)),
        (lambda x: x + 1, lambda x: x.add(1, alpha=1)),
        (lambda x: x / 2, lambda x: torch.div(x, 2.0)),
        (lambda x: x / 2, lambda x: torch.true_divide(x, 2)),
        (lambda x: -x, lambda x: torch.neg(x)),
        (lambda x: x**2, lambda x: torch.pow(x, exponent=2)),
        (lambda x: x - 1, lambda x: x.sub(1)),
        (lambda x: x // 2, lambda x: torch.floor_divide(x, 2)),
        (lambda x: ~x, lambda x: x.bitwise_not()),
        (lambda x: F.relu(x), lambda x: torch.relu(x)),
        (lambda x: x.relu(), lambda x: F.relu(x, inplace=False)),
        (lambda x: torch.tanh(x), lambda x: F.tanh(x)),
        (lambda x: torch.sigmoid(x), lambda x: x.sigmoid()),
        (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none")),
        (lambda x: x.transpose(1, 2), lambda x: torch.transpose(x, dim0=1, dim1=2)),
        (lambda x: x.transpose(1, 2), lambda x: x.swapaxes(1, 2)),
        (lambda x: x.permute(0, 2, 1), lambda x: torch.permute(x, (0, 2, 1))),
        (lambda x: x.permute((0, 2, 1)), lambda x: x.permute(0, 2, 1)),
        (lambda x: x.view(2, -1), lambda x: x.view([2, -1])),
        (lambda x: x.view(-1), lambda x: x.view((-1,))),
        (lambda x: x.reshape(2, -1), lambda x: torch.reshape(x, shape=(2, -1))),
        (lambda x: x.sum(-1), lambda x: torch.sum(x, dim=(-1,))),
        (lambda x: x.mean(-1, keepdim=True), lambda x: torch.mean(x, -1, True)),
        (lambda x: x.var(-1, unbiased=False), lambda x: torch.var(x, dim=-1, unbiased=False)),
        (lambda x: x.var(-1), lambda x: torch.var(x, dim=-1)),
        (lambda x: x.max(-1), lambda x: torch.max(x, dim=-1)),
        (lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)),
        (lambda x: x.split(4, -1), lambda x: torch.split(x, 4, dim=-1)),
        (lambda x: torch.cat((x, x), -1), lambda x: torch.cat([x, x], dim=-1)),
        (lambda x: F.dropout(x), lambda x: torch.dropout(x, 0.5, True)),
        (lambda x: x[..., :4], lambda x: operator.getitem(x, (..., slice(None, 4)))),
        (lambda x: F.layer_norm(x, (4,)), lambda x: torch.layer_norm(x, [4])),
        (lambda x: F.linear(x, x), lambda x: F.linear(x, weight=x, bias=None)),
        (lambda x: x.view(x.shape[0], -1), lambda x: x.view(x.size(0), -1)),
        (lambda x: x.view(x.shape), lambda x: x.view(x.size())),
        (lambda x: x.view(x.size(0), x.size(1) * 2), lambda x: x.view((x.shape[0], x.shape[1] * 2))),
    ],
)
def test_spellings_of_one_operation_match_each_other(in_pattern, in_graph):
    for pattern, model in ((in_pattern, in_graph), (in_graph, in_pattern)):
        (match,) = found(model, pattern)
        assert names(match.inputs) == ["x"]


@pytest.mark.parametrize(
    ("in_pattern", "in_graph"),
    [
        (lambda x: x.view(2, -1), lambda x: x.reshape(2, -1)),
        (lambda x: x.add(1), lambda x: x.add_(1)),
        (lambda x: x.view(2, -1), lambda x: x.view(-1, 2)),
        (lambda x: torch.bmm(x, x), lambda x: torch.matmul(x, x)),
        (lambda x: F.softmax(x, dim=-1), lambda x: F.softmax(x, dim=-1, dtype=torch.float32)),
        (lambda x: F.relu(x), lambda x: F.relu(x, inplace=True)),
        (lambda x: x[1], lambda x: x[[1]]),
        (lambda x: x[:4], lambda x: x[4:]),
        (lambda x: x.T, lambda x: x.mT),
        (lambda x: x.div(2, rounding_mode="floor"), lambda x: x / 2),
        (lambda x: x.view(x.size(0), -1), lambda x: x.view(x.size(1), -1)),
    ],
)
def test_other_operations_do_not(in_pattern, in_graph):
    assert found(in_graph, in_pattern) == []
    assert found(in_pattern, in_graph) == []
    assert len(found(in_pattern, in_pattern)) == len(found(in_graph, in_graph)) == 1


def test_in_place_operator_of_a_pattern_is_the_operation_in_place():
    def pattern(a, b):
        a += b
        return torch.tanh(a)

    assert len(found(lambda x, y: torch.tanh(x.add_(y)), pattern)) == 1
    assert found(lambda x, y: torch.tanh(x + y), pattern) == []


@pytest.mark.parametrize(
    ("in_pattern", "in_graph", "number"),
    [(0.5, 0.5, 1), (2, 2.0, 1), (2.0, 2, 1), (0.5, 0.25, 0), (1, True, 0), (-float("inf"), -float("inf"), 1)],
)
def test_constants_must_be_equal(in_pattern, in_graph, number):
    assert len(found(lambda x: x.clamp(in_graph), lambda a: a.clamp(in_pattern))) == number


def test_argument_of_the_pattern_matches_node_and_constant():
    pattern = lambda a, scale: torch.softmax(a * scale, -1)  # noqa: E731
    assert found(lambda x: torch.softmax(x * 0.125, -1), pattern)[0].inputs[1] == 0.125
    assert names(found(lambda x, s: torch.softmax(x * s, -1), pattern)[0].inputs) == ["x", "s"]
    assert found(lambda x: F.dropout(x, 0.1, training=False), lambda a, p, t: F.dropout(a, p, t))[0].inputs[1:] == (
        0.1,
        False,
    )
    # a default of the call is a constant like any other, one of the pattern's own arguments means nothing
    assert found(lambda x: F.dropout(x, training=False), lambda a, p=0.9: F.dropout(a, p, False))[0].inputs[1] == 0.5


def test_argument_stands_for_a_whole_shape_or_list():
    (match,) = found(lambda x, y: torch.relu(x).view(x.size(0), 4, -1), lambda a, shape: torch.relu(a).view(shape))
    assert names(match.inputs[1]) == ["size", 4, -1]
    (match,) = found(lambda x, y: torch.relu(torch.cat([x, y])), lambda parts: torch.relu(torch.cat(parts)))
    assert names(match.inputs[0]) == ["x", "y"]


def test_argument_used_twice_matches_one_value():
    pattern = lambda a, b: torch.tanh(a) * (a + b)  # noqa: E731
    assert names(found(lambda x, y: torch.tanh(y) * (x + y), pattern)[0].inputs) == ["y", "x"]
    assert found(lambda x, y, z: torch.tanh(z) * (x + y), pattern) == []
    assert found(lambda x: (x * 2) + 3, lambda a, c: (a * c) + c) == []
    assert found(lambda x: (x * 2) + 2.0, lambda a, c: (a * c) + c)[0].inputs[1] == 2
    # two nodes for one size are one value
    assert len(found(lambda x: x.view(x.size(0), x.size(0)), lambda a, n: a.view(n, n))) == 1
    assert found(lambda x: x.view(x.size(0), x.size(1)), lambda a, n: a.view(n, n)) == []


def test_input_is_never_an_intermediate_value():
    assert found(lambda x: (h := torch.relu(x)) + h, lambda a, b: torch.relu(a) + b) == []
    assert len(found(lambda x: (h := torch.relu(x)) + h, lambda a: (h := torch.relu(a)) + h)) == 1


def test_sizes_that_only_feed_the_match_are_part_of_it():
    def pattern(a):
        return torch.relu(a).view(a.size(0), -1)

    assert shown(found(lambda x: torch.relu(x).view(x.size(0), -1), pattern))[0][0] == ["relu", "size", "view"]
    # what an argument stands for comes from outside
    argument = lambda a, n: torch.relu(a).view(n, -1)  # noqa: E731
    assert shown(found(lambda x: torch.relu(x).view(x.size(0), -1), argument))[0][:2] == (
        ["relu", "view"],
        ["x", "size"],
    )
    # where others need them they stay outside, for any number of matches
    model = lambda x: (torch.relu(x).view(n := x.size(0), -1), torch.relu(x).view(n, -1))  # noqa: E731
    assert [match[0] for match in shown(found(model, pattern))] == [["relu", "view"], ["relu_1", "view_1"]]


def test_sizes_are_compared_by_value_where_the_graph_knows_them():
    """A traced graph reads a size from whatever tensor has it, and has a constant for one that never changes."""
    graph, owner = graph_of(lambda x, y: torch.relu(y).view(x.size(0), 12))
    x, y, relu, size, view = list(graph.nodes)[:5]
    for node in (x, y, relu):
        node.meta["val"] = torch.empty(7, 3, 4)
    size.meta.update(kind="sym", size=7)
    pattern = lambda a: torch.relu(a).view(a.size(0), a.size(1) * a.shape[-1])  # noqa: E731
    assert names(find_pattern(graph, owner, pattern)[0].outputs) == [view.name]
    assert find_pattern(graph, owner, lambda a: torch.relu(a).view(a.size(0), a.size(3))) == []
    # a size of another form, which only the tracer knows to be one
    with graph.inserting_before(view):
        least = graph.call_function(torch.sym_max, (size, 1))
        least.meta.update(kind="sym", size=7)
    view.args = (relu, least, 12)
    assert names(find_pattern(graph, owner, pattern)[0].nodes) == ["relu", "size", "sym_max", "view"]
    y.meta["val"] = torch.empty(7, 12)
    assert len(find_pattern(graph, owner, lambda a: torch.relu(a).view(a.shape))) == 1
    y.meta["val"] = torch.empty(6, 3, 4)
    assert find_pattern(graph, owner, pattern) == []


def test_several_results():
    def pattern(a):
        h = torch.tanh(a)
        return h * 2, h, h + 3

    def model(x):
        h = torch.tanh(x)
        return (h + 3) - torch.relu(h) - (h * 2)

    (match,) = found(model, pattern)
    assert names(match.nodes) == ["tanh", "add", "mul"]
    assert names(match.outputs) == ["mul", "tanh", "add"]


def test_match_that_would_need_its_own_result_is_none():
    def model(x):
        h = torch.relu(x)
        return h, x * h.exp()

    assert "an input of the match is computed from one of its results" in missed(
        model, lambda a, b: (torch.relu(a), a * b)
    )
    assert len(found(lambda x, y: (torch.relu(x), x * y.exp()), lambda a, b: (torch.relu(a), a * b))) == 1


def test_siblings_match_in_graph_order_and_each_once():
    siblings = lambda a, u, v: (F.linear(a, u), F.linear(a, v))  # noqa: E731

    def model(x, y, a, b, c, d):
        return F.linear(x, a), F.linear(y, a), F.linear(x, b), F.linear(x, c), F.linear(x, d), F.linear(y, b)

    assert [names(match.outputs) for match in found(model, siblings)] == [
        ["linear", "linear_2"],
        ["linear_1", "linear_5"],
        ["linear_3", "linear_4"],
    ]
    three = lambda a, u, v, w: (F.linear(a, u), F.linear(a, v), F.linear(a, w))  # noqa: E731
    assert [names(match.inputs) for match in found(model, three)] == [["x", "a", "b", "c"]]


def test_siblings_by_path_in_the_order_of_the_pattern():
    def pattern(x):
        return module("q")(x), module("k")(x), module("v")(x)

    (match,) = found(lambda m, x: m.k(x) + m.v(x) * m.q(x), pattern)
    assert (names(match.nodes), names(match.outputs)) == (["k", "v", "q"], ["q", "k", "v"])
    assert found(lambda m, x, y: m.k(x) + m.v(y) * m.q(x), pattern) == []
    assert "nothing beside it is the pattern's module('v')" in missed(lambda m, x: m.k(x) * m.q(x), pattern)


def test_siblings_that_share_only_a_weight():
    pattern = lambda a, b, w: (F.linear(a, w), F.linear(b, w))  # noqa: E731
    assert names(found(lambda x, y, w: F.linear(x, w) + F.linear(y, w), pattern)[0].inputs) == ["x", "y", "w"]


def test_long_graph_is_quick():
    def model(x):
        for _ in range(700):
            x = torch.relu(x * 2 + 1) + x
        return torch.softmax(x, -1)

    graph, owner = graph_of(model)
    start = time.perf_counter()
    assert len(find_pattern(graph, owner, lambda a: torch.softmax(a + 0, -1))) == 0
    assert len(find_pattern(graph, owner, lambda a, b: torch.relu(a * 2 + 1) + b)) == 700
    assert len(find_pattern(graph, owner, lambda a: (a * 2, a * 3))) == 0
    # some 0.2 s; anything quadratic takes many seconds
    assert time.perf_counter() - start < 2


def sum_of(terms, sign="+", arguments=40):
    names = ", ".join(f"x{i}" for i in range(arguments))
    return eval(f"lambda {names}: torch.tanh({f' {sign} '.join(terms)})", globals())


PRODUCTS = [f"torch.tanh(x{i} * x{i + 1})" for i in range(2, 40, 2)]


def test_operands_that_could_be_swapped_everywhere_are_quick():
    """All 2^19 orders of the factors, or of the terms, would take minutes."""
    start = time.perf_counter()
    terms = [f"(torch.tanh(x{i}) + torch.tanh(x{i + 1}))" for i in range(0, 40, 2)]
    for pattern in (sum_of([*PRODUCTS, "x0", "x1"]), sum_of(terms, "-")):
        graph, owner = graph_of(pattern)
        assert len(find_pattern(graph, owner, pattern)) == 1
        *_, inner, last, output = graph.nodes
        output.args = ((inner, last),)
        assert find_pattern(graph, owner, pattern) == []
        assert f"the intermediate value %{inner.name} is also used by %output" in nearest_miss(graph, owner, pattern)
    # the term that does not match is looked at last
    differing = sum_of(["x0.clamp(1).clamp(2)", "x1", *PRODUCTS])
    assert found(differing, sum_of(["x0.clamp(x1).clamp(x1)", "x1", *PRODUCTS])) == []
    assert time.perf_counter() - start < 5
