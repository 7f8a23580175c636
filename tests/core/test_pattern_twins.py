"""Modules and their functional twins match each other where their settings agree; ``module`` matches by path."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from leaf_graphs import found, graph_of, missed, names
from partbook.core import create_schedule
from partbook.core.execution import plan_of
from partbook.core.patterns import Attribute, find_pattern, module

TWINS = [
    (lambda: nn.GELU(), lambda x: F.gelu(x)),
    (lambda: nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (lambda: nn.ReLU(), lambda x: torch.relu(x)),
    (lambda: nn.ReLU(inplace=True), lambda x: F.relu(x, inplace=True)),
    (lambda: nn.SiLU(), lambda x: F.silu(x)),
    (lambda: nn.Tanh(), lambda x: x.tanh()),
    (lambda: nn.Sigmoid(), lambda x: torch.sigmoid(x)),
    (lambda: nn.Softmax(-1), lambda x: x.softmax(-1)),
    (lambda: nn.Dropout(0.1), lambda x: F.dropout(x, 0.1, training=True)),
    (lambda: nn.Dropout(0.1).eval(), lambda x: F.dropout(x, 0.1, training=False)),
    (lambda: nn.LayerNorm(4, elementwise_affine=False), lambda x: F.layer_norm(x, (4,))),
    (lambda: nn.RMSNorm(4, eps=1e-6, elementwise_affine=False), lambda x: F.rms_norm(x, (4,), eps=1e-6)),
    (lambda: GELUActivation(), lambda x: F.gelu(x)),
    (lambda: GELUTanh(), lambda x: F.gelu(x, approximate="tanh")),
    (lambda: SiLUActivation(), lambda x: F.silu(x)),
]


@pytest.mark.parametrize(("make", "function"), TWINS)
def test_module_and_function_match_both_ways(make, function):
    child = make()
    in_graph = lambda m, x: m.child(x)  # noqa: E731
    assert names(found(in_graph, lambda x: function(x), child=child)[0].nodes) == ["child"]
    assert names(found(function, lambda x: child(x))[0].inputs) == ["x"]
    assert len(found(in_graph, lambda x: make()(x), child=child)) == 1


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: nn.GELU("tanh"), lambda x: F.gelu(x)),
        (lambda: nn.GELU(), lambda x: F.gelu(x, approximate="tanh")),
        (lambda: GELUActivation(), lambda x: F.gelu(x, approximate="tanh")),
        (lambda: nn.ReLU(inplace=True), lambda x: torch.relu(x)),
        (lambda: nn.Softmax(0), lambda x: torch.softmax(x, -1)),
        (lambda: nn.Dropout(0.1), lambda x: F.dropout(x, 0.2)),
        (lambda: nn.Dropout(0.1).eval(), lambda x: F.dropout(x, 0.1)),
        (lambda: nn.LayerNorm(4, eps=1e-6, elementwise_affine=False), lambda x: F.layer_norm(x, (4,))),
        # computed by hand: not the same bits
        (lambda: NewGELUActivation(), lambda x: F.gelu(x, approximate="tanh")),
        (lambda: GELUActivation(use_gelu_python=True), lambda x: F.gelu(x)),
        (lambda: GELUTanh(use_gelu_tanh_python=True), lambda x: F.gelu(x, approximate="tanh")),
        (lambda: ACT2FN["quick_gelu"], lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_other_settings_do_not_match(make, function):
    child = make()
    assert found(lambda m, x: m.child(x), lambda x: function(x), child=child) == []
    assert found(function, lambda x: child(x)) == []
    # the same module in both is one
    assert len(found(lambda m, x: m.child(x), lambda x: child(x), child=child)) == 1


def test_mode_of_a_module_is_an_attribute_and_not_the_constant_that_it_is_now():
    """One graph may serve both modes, so what replaces the match must read the flag when it runs."""
    model = lambda m, x: torch.relu(m.child(x))  # noqa: E731
    (match,) = found(model, lambda x, p, mode: torch.relu(F.dropout(x, p, mode)), child=nn.Dropout(0.1))
    assert match.inputs[1:] == (0.1, Attribute("child.training"))
    assert match.modes == ()
    # a match that a constant depends on says so
    for training in (True, False):
        child = nn.Dropout(0.1).train(training)
        (match,) = found(model, lambda x, p: torch.relu(F.dropout(x, p, training)), child=child)  # noqa: B023
        assert match.modes == ((Attribute("child.training"), training),)
        told = missed(model, lambda x, p: torch.relu(F.dropout(x, p, not training)), child=child)  # noqa: B023
        assert f"'training' of %child is child.training, the pattern has {not training}" in told
    (match,) = found(lambda m, x: m.child(x), lambda x: nn.Conv1d(4, 4, 3)(x), child=nn.Conv1d(4, 4, 3))
    assert match.modes == ((Attribute("child.training"), True),)


def test_subclass_or_instance_with_a_forward_of_its_own_is_no_twin():
    class Loud(nn.GELU):
        def forward(self, x):
            return super().forward(x) * 2

    pattern = lambda x: F.gelu(x)  # noqa: E731
    assert found(lambda m, x: m.child(x), pattern, child=Loud()) == []
    changed = nn.GELU()
    changed.forward = lambda x: x
    assert found(lambda m, x: m.child(x), pattern, child=changed) == []


def test_parameters_of_a_module_are_attributes():
    pattern = lambda x, w, b: torch.relu(F.linear(x, w, b))  # noqa: E731
    (match,) = found(lambda m, x: torch.relu(m.q(x)), pattern)
    assert match.inputs[1:] == (Attribute("q.weight"), Attribute("q.bias"))
    # a bias that is not there is the constant None
    (match,) = found(lambda m, x: torch.relu(m.child(x)), pattern, child=nn.Linear(4, 4, bias=False))
    assert match.inputs[1:] == (Attribute("child.weight"), None)
    assert found(lambda m, x: torch.relu(m.q(x)), lambda x, w: torch.relu(F.linear(x, w))) == []
    (match,) = found(lambda m, x: m.child(x), lambda i, w: F.embedding(i, w), child=nn.Embedding(3, 4))
    assert match.inputs[1] == Attribute("child.weight")
    assert found(lambda m, x: m.child(x), lambda i, w: F.embedding(i, w), child=nn.Embedding(3, 4, 0)) == []
    (match,) = found(lambda m, x: m.child(x), lambda x, w, b: F.layer_norm(x, (4,), w, b), child=nn.LayerNorm(4))
    assert match.inputs[1:] == (Attribute("child.weight"), Attribute("child.bias"))


def test_parameter_of_a_module_is_the_same_as_a_node_that_reads_it():
    pattern = lambda x, w, b: F.linear(x, w, b) * w  # noqa: E731
    assert names(found(lambda m, x: m.q(x) * m.q.weight, pattern)[0].nodes) == ["q", "mul"]
    assert found(lambda m, x: m.q(x) * m.k.weight, pattern) == []


def test_siblings_without_a_path():
    pattern = lambda x, a, b, c, d: (F.linear(x, a, c), F.linear(x, b, d))  # noqa: E731
    (match,) = found(lambda m, x, y: m.v(y) + m.k(x) * m.q(x), pattern)
    assert match.inputs[1:] == tuple(map(Attribute, ("k.weight", "q.weight", "k.bias", "q.bias")))


def test_linear_written_in_a_pattern_matches_one_of_its_size():
    def pattern(x):
        return torch.relu(nn.Linear(4, 6)(x))

    assert len(found(lambda m, x: torch.relu(m.child(x)), pattern, child=nn.Linear(4, 6))) == 1
    assert found(lambda m, x: torch.relu(m.child(x)), pattern, child=nn.Linear(4, 6, bias=False)) == []
    told = missed(lambda m, x: torch.relu(m.child(x)), pattern, child=nn.Linear(4, 5))
    assert "argument 'weight' of %child is child.weight, the pattern has a parameter of shape (6, 4)" in told
    written_out = lambda m, x: torch.relu(F.linear(x, m.child.weight, m.child.bias))  # noqa: E731
    assert len(found(written_out, pattern, child=nn.Linear(4, 6))) == 1


def test_module_without_a_twin_matches_its_type_and_settings():
    pattern = lambda x: torch.relu(nn.Conv1d(4, 4, 3, padding=1)(x))  # noqa: E731
    model = lambda m, x: torch.relu(m.child(x))  # noqa: E731
    assert len(found(model, pattern, child=nn.Conv1d(4, 4, 3, padding=1))) == 1
    told = missed(model, pattern, child=nn.Conv1d(4, 4, 3, padding=2))
    assert told.endswith("%child differs in 'padding' from the pattern's")
    chain = lambda x: torch.relu(nn.Sequential(nn.Tanh(), nn.Tanh())(x))  # noqa: E731
    assert len(found(model, chain, child=nn.Sequential(nn.Tanh(), nn.Tanh()))) == 1
    assert "differs in 'children'" in missed(model, chain, child=nn.Sequential(nn.Tanh()))
    assert "%child, the pattern has Conv1d" in missed(model, pattern, child=nn.Conv2d(4, 4, 3, padding=1))


@pytest.mark.parametrize(
    ("glob", "matched"),
    [
        ("q", ["q"]),
        ("?", ["q", "k"]),
        ("*", ["q", "k", "child"]),
        ("**.0", ["child_0"]),
        ("**", ["q", "k", "child", "child_0"]),
        ("child.*", ["child_0"]),
        ("q.*", []),
    ],
)
def test_module_matches_by_path(glob, matched):
    model = lambda m, x: m.child[0](m.child(m.k(m.q(x))))  # noqa: E731
    matches = found(model, lambda x: module(glob)(x), child=nn.Sequential(nn.Tanh()))
    assert [name for match in matches for name in names(match.nodes)] == matched


def test_module_by_path_takes_arguments_by_position_or_name():
    class Scaled(nn.Module):
        def forward(self, x, scale=1, *, shift=None):
            return x * scale

    model = lambda m, x: m.child(x, 2, shift=None)  # noqa: E731
    for pattern in (
        lambda a: module("child")(a, 2),
        lambda a: module("child")(x=a, scale=2.0),
        lambda a: module("child")(a, scale=2, shift=None),
    ):
        assert names(found(model, pattern, child=Scaled())[0].inputs) == ["x"]
    assert found(model, lambda a, s: module("child")(a, s), child=Scaled())[0].inputs[1] == 2
    told = missed(model, lambda a: module("child")(a), child=Scaled())
    assert told.endswith("argument 'scale' of %child is 2, the pattern has 1")
    assert found(model, lambda a: module("child")(a, size=2), child=Scaled()) == []


def test_module_takes_containers_of_values():
    class Mixed(nn.Module):
        def forward(self, x, extras):
            return x

    model = lambda m, x, y: m.child(x, {"a": [y, 2]})  # noqa: E731
    (match,) = found(model, lambda a, b: module("child")(a, extras={"a": (b, 2)}), child=Mixed())
    assert names(match.inputs) == ["x", "y"]
    assert found(model, lambda a, b: module("child")(a, extras={"b": (b, 2)}), child=Mixed()) == []


def test_module_that_is_called_with_more_than_the_function_takes_is_no_twin():
    """A hook may take what its forward does not."""
    assert found(lambda m, x: m.act(x, 1), lambda x: F.gelu(x)) == []


def test_module_of_another_kind_matches_by_path_only():
    model = lambda m, x: torch.relu(m.child(x))  # noqa: E731
    assert len(found(model, lambda x: torch.relu(module("child")(x)), child=Conv1D(4, 4))) == 1
    assert found(model, lambda x, w, b: torch.relu(F.linear(x, w, b)), child=Conv1D(4, 4)) == []


def test_scheduled_module_and_one_with_hooks_are_still_the_function():
    graph, owner = graph_of(lambda m, x: m.act(m.q(x)))
    sch = create_schedule(owner)
    sch["q"].checkpoint()
    sch["act"].checkpoint()
    owner.act.register_forward_hook(lambda *args: None)
    assert plan_of(owner.act) is not None
    (match,) = find_pattern(graph, owner, lambda x, w, b: nn.GELU()(F.linear(x, w, b)))
    assert names(match.nodes) == ["q", "act"]


class Product:
    """A linear without its bias, called with the traced module and the input."""

    __name__ = "product"

    def __init__(self, path):
        self.path = path

    def __call__(self, owner, x):
        return F.linear(x, owner.get_submodule(self.path).weight)

    def twin_arguments(self, owner, args):
        return F.linear, {"input": args[1], "weight": Attribute(f"{self.path}.weight")}


def test_callable_target_may_say_which_function_it_stands_for():
    graph, owner = graph_of(lambda m, x: F.gelu(m.q(x)))
    call = next(node for node in graph.nodes if node.op == "call_module")
    with graph.inserting_after(call):
        bias = graph.get_attr("q.bias")
        product = graph.call_function(Product("q"), (call.args[0], call.args[0]))
        whole = graph.call_function(torch.add, (product, bias))
    call.replace_all_uses_with(whole)
    graph.erase_node(call)
    (match,) = find_pattern(graph, owner, lambda x, w, b: F.gelu(F.linear(x, w) + b))
    assert match.inputs[1:] == (Attribute("q.weight"), bias)
    (match,) = find_pattern(graph, owner, lambda y, b: F.gelu(y + b))
    assert match.inputs == (product, bias)
    assert find_pattern(graph, owner, lambda x, w, b: F.gelu(F.linear(x, w, b))) == []


def test_leaf_function_of_the_user_is_its_own_operation():
    """As the target of a node a function is known by itself, not by its name."""
    graph, owner = graph_of(lambda x: torch.relu(x))
    call = next(node for node in graph.nodes if node.op == "call_function")

    def relu(x):
        return x

    call.target = functools.wraps(torch.relu)(relu)
    assert find_pattern(graph, owner, lambda x: torch.relu(x)) == []
