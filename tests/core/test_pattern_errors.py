"""What is no pattern, and how far the nearest miss came."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leaf_graphs import found, graph_of, missed
from partbook.core.errors import PartbookError
from partbook.core.patterns import PatternError, module, nearest_miss


def branch(x):
    return x * 2 if x.sum() > 0 else x


def loop(x):
    for row in x:
        x = x + row
    return x


def dead(x):
    torch.relu(x)
    return x * 2


def broken(x):
    return x + undefined  # noqa: F821


HELD = torch.ones(2)
WEIGHT = nn.Parameter(torch.ones(2))


def only_named(x, *, scale):
    return x * scale


def any_number(x, *rest):
    return x * 2


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (branch, r"pattern branch: cannot be traced: .*control flow.*a straight line of torch operations"),
        (loop, r"pattern loop: cannot be traced: .*a straight line of torch operations"),
        (broken, r"cannot be traced: name 'undefined' is not defined"),
        (dead, r"does not use the result of .*relu.*: return it, or leave it out"),
        (lambda x: x, r"returns its argument 'x': return the result of an operation"),
        (lambda x: torch.relu(x).size(0), r"returns the size .*size"),
        (lambda x: (torch.relu(x), x), r"returns its argument 'x'"),
        (lambda x: None, r"returns None: return the result"),
        (lambda x: (x + 1, 2), r"returns 2: return the result"),
        (lambda x: (), r"returns nothing"),
        (lambda x: {"y": x + 1}, r"returns \{'y': add\}"),
        (lambda x: (y := x + 1, y), r"returns one result twice"),
        (lambda x, y: x + 1, r"does not use its argument 'y': leave it out"),
        (lambda x: x + HELD, r"holds a tensor: make it an argument"),
        (lambda x: x + WEIGHT, r"holds a tensor: make it an argument"),
        (lambda x, y: (torch.relu(x), torch.relu(y)), r"relu_1 has nothing in common with the other results"),
        (only_named, r"the argument scale: name each value"),
        (any_number, r"the argument \*rest: name each value"),
        (nn.GELU(), r"is a GELU: write it as a function"),
        ([1], r"is a list: write it as a function"),
        (torch.relu, r"is a builtin_function_or_method: write it as a function"),
        (lambda x: module("q")(1) + x, r"module\('q'\) is called without a value of a pattern"),
    ],
)
def test_what_is_no_pattern_is_told(pattern, told):
    with pytest.raises(PatternError, match=told):
        found(lambda x: x * 2, pattern)
    assert issubclass(PatternError, PartbookError)
    assert issubclass(PatternError, ValueError)


def test_module_is_for_patterns_only():
    with pytest.raises(PatternError, match=r"module\('q'\) is called without a value of a pattern"):
        module("q")(torch.ones(1))


def test_results_may_be_connected_through_a_later_one():
    pattern = lambda x, y: (torch.relu(x), torch.relu(y), x * y)  # noqa: E731
    assert len(found(lambda x, y: (x * y) + torch.relu(x) + torch.relu(y), pattern)) == 1


def test_sizes_that_a_pattern_unpacks_and_does_not_use_are_no_mistake():
    def pattern(x):
        batch, length, _ = x.shape
        return x.view(batch, length, 2, -1)

    assert len(found(lambda x: x.view(x.size(0), x.size(1), 2, -1), pattern)) == 1


def attention(q, k, mask):
    return torch.softmax(torch.matmul(q, k) * 0.5 + mask, dim=-1)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            lambda x, y: torch.tanh(x @ y) * 2,
            r"^no node of the graph is the pattern's softmax; there are \['matmul', 'mul', 'tanh'\]$",
        ),
        (
            lambda x, y: torch.softmax(torch.tanh(x), dim=-1),
            r"^the nearest miss has 1 of 4 operations: argument 'input' of %softmax is %tanh, a tanh, "
            r"the pattern has add$",
        ),
        (
            lambda x, y: torch.softmax((x @ y) * 0.25 + y, dim=-1),
            r"^the nearest miss has 4 of 4 operations: argument 'other' of %mul is 0.25, the pattern has 0.5$",
        ),
        (
            lambda x, y: torch.softmax((x @ y) * 0.5 + y, dim=0),
            r"has 4 of 4 operations: argument 'dim' of %softmax is 0, the pattern has -1$",
        ),
        (
            lambda x, y: torch.softmax((x @ y) * 0.5 + y, dim=-1, dtype=torch.float32),
            r"has 4 of 4 operations: argument 'dtype' of %softmax is torch.float32, the pattern has None$",
        ),
        (
            lambda x, y: (torch.softmax((s := (x @ y) * 0.5) + y, dim=-1), s + 1),
            r"has 4 of 4 operations: the intermediate value %mul is also used by %add_1$",
        ),
        # the better of two places, though the worse one is first
        (
            lambda x, y: torch.softmax(x, -1) + torch.softmax((x - y) * 0.5 + y, -1),
            r"has 3 of 4 operations: argument 'input' of %mul is %sub, a sub, the pattern has matmul$",
        ),
    ],
)
def test_nearest_miss_says_what_stopped_it(model, told):
    assert re.search(told, missed(model, attention))


def test_nearest_miss_shows_both_values_of_an_argument():
    told = missed(lambda x, y: torch.tanh(x) * torch.relu(y), lambda a: torch.tanh(a) * torch.relu(a))
    assert told.endswith("argument 'input' of %relu is %y, the pattern has %x there again")


def test_nearest_miss_shows_the_users_line_where_the_graph_knows_it():
    graph, owner = graph_of(lambda x: F.dropout(torch.relu(x), 0.1, training=True))
    next(node for node in graph.nodes if node.name == "dropout").meta["where"] = "model.py:7 in forward"
    told = nearest_miss(graph, owner, lambda a: F.dropout(torch.relu(a), 0.2))
    assert told.endswith("argument 'p' of %dropout (at model.py:7 in forward) is 0.1, the pattern has 0.2")


def test_nearest_miss_of_a_pattern_that_matches_says_so():
    graph, owner = graph_of(lambda x: torch.relu(x))
    assert nearest_miss(graph, owner, lambda a: F.relu(a)) == "the pattern matches"
