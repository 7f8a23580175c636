"""Compiled and recomputed regions: numbers, gradients and masks of the plain graph, compiled once; refusals."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fx_graphs import Block, Forked, between, graph_of, named, numbers, straight
from partbook.core import Mesh
from partbook.core.errors import Problem
from partbook.core.execution import change_plan
from partbook.core.tracing import fused
from partbook.core.tracing.code import code_of, compile_graph
from partbook.core.tracing.fused import checkpoint_problems, checkpointed, compiled, fuse_problems, grouped, label_of
from partbook.core.tracing.lowering import inline_modules
from partbook.core.tracing.region import carve, outputs_of


def test_checkpoint_around_a_region_recomputes_in_training_only() -> None:
    block = Block().double()
    plain, graph = graph_of(block), graph_of(block)
    count = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return F.softmax(x, dim=-1)

    [softmax] = named(graph, "softmax")
    softmax.target, softmax.kwargs = counted, {}
    inner = carve(graph, named(graph, "softmax", "dropout"), named(graph, "dropout"), grouped("inner"))
    outer = [*named(graph, "drop", "mul"), inner]
    assert not list(checkpoint_problems(graph, outer, [inner]))
    carve(graph, outer, [inner], checkpointed("outer"))
    for expected, found in zip(numbers(plain, block), numbers(graph, block), strict=True):
        assert torch.equal(expected, found)
    assert count == 2
    numbers(graph, block.eval())
    assert count == 3


def test_inductor_compiles_once_for_all_lengths_and_equal_blocks() -> None:
    """Activations, norm and dropout become part of the region; masks are those of the plain graph."""
    torch._dynamo.reset()
    fused._inductor.cache_clear()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for path in ("h.0", "h.1"):
        block = Block().double()
        plain, graph = graph_of(block), graph_of(block)
        nodes = between(graph, "drop", "norm")
        outputs = outputs_of(graph, nodes)
        assert not list(fuse_problems(graph, nodes, outputs, block, "inductor"))
        node = carve(graph, nodes, outputs, compiled(label_of(nodes), block, "inductor", path))
        assert node.target.inlined == ("drop", "norm")
        assert not node.target.graph.find_nodes(op="call_module")
        for length in (5, 7, 11):
            torch.testing.assert_close(numbers(graph, block, length), numbers(plain, block, length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    assert fused._inductor.cache_info().misses == 1


def test_torchscript_gives_the_same_numbers_with_sizes_as_inputs() -> None:
    block = Block().double().eval()
    plain, graph = graph_of(block), graph_of(block)
    nodes = named(graph, "softmax", "dropout", "view", "view_1", "add", "view_2", "norm")
    outputs = outputs_of(graph, nodes)
    assert not list(fuse_problems(graph, nodes, outputs, block, "torchscript"))
    node = carve(graph, nodes, outputs, compiled("tail", block, "torchscript"))
    assert ": int" in code_of(node.target.graph, "").text
    # TorchScript optimises after the first calls.
    for length in (5, 7, 5, 5, 9):
        torch.testing.assert_close(numbers(graph, block, length), numbers(plain, block, length))


@pytest.mark.parametrize("activation", [nn.GELU(), *(ACT2FN[name] for name in ("gelu_new", "quick_gelu", "relu2"))])
def test_activations_become_part_of_a_torchscript_region(activation: nn.Module) -> None:
    block = Block(activation).double().eval()
    plain, graph = graph_of(block), graph_of(block)
    nodes = named(graph, "up", "act")
    assert not list(fuse_problems(graph, nodes, nodes[1:], block, "torchscript"))
    node = carve(graph, nodes, nodes[1:], compiled("linear_act", block, "torchscript"))
    assert node.target.attributes == ("up.weight", "up.bias")
    torch.testing.assert_close(numbers(graph, block), numbers(plain, block))


def test_compiled_region_contains_the_nodes_of_a_region_inside() -> None:
    block = Block().double().eval()
    plain, graph = graph_of(block), graph_of(block)
    inner = carve(graph, named(graph, "act", "down"), named(graph, "act", "down"), grouped("inner"))
    nodes = [*named(graph, "up"), inner, *named(graph, "getitem", "getitem_1", "drop")]
    carve(graph, nodes, nodes[-1:], compiled("outer", block, "torchscript"))
    torch.testing.assert_close(numbers(graph, block), numbers(plain, block))


def test_modules_that_somebody_watches_stay_calls() -> None:
    block, seen = Block().double(), []
    block.act.register_forward_hook(lambda module, args, output: seen.append(module))
    graph = graph_of(block)
    nodes = named(graph, "up", "act")
    region = carve(graph, nodes, nodes[1:], compiled("up_act", block, "inductor")).target
    assert region.inlined == ("up",)
    assert [node.target for node in region.graph.find_nodes(op="call_module")] == ["act"]
    graph = graph_of(block)
    [problem] = fuse_problems(graph, named(graph, "act"), named(graph, "act"), block, "torchscript")
    assert problem.found == "TorchScript cannot call the module 'act' (GELU): it has hooks"


def test_error_of_the_compiler_names_the_region() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    graph = fx.Graph()
    graph.placeholder("self")
    node = graph.call_function(broken, (graph.placeholder("x"),))
    graph.output([node])
    carve(graph, [node], [node], compiled("fused_broken", Block(), "inductor", "h.3.mlp"))
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compile_graph(graph, "h.3.mlp")(Block(), torch.ones(2))
    assert caught.value.__notes__ == ["in inductor region 'fused_broken' of 'h.3.mlp'"]


def test_torchscript_refusal_quotes_torch() -> None:
    def variadic(*xs: Tensor) -> Tensor:
        return xs[0]

    graph, by_name = straight()
    by_name["a"].target = variadic
    before = str(graph)
    [problem] = fuse_problems(graph, [by_name["a"]], [by_name["a"]], Block(), "torchscript")
    assert problem.found.startswith("TorchScript refuses the region: ")
    assert "variable number of arguments" in problem.found
    assert problem.hint == 'leave that operation out of the nodes, or fuse with compiler="inductor"'
    assert str(graph) == before


def test_torchscript_refuses_modules_that_python_steers() -> None:
    block = Block(Forked())
    graph = graph_of(block)
    [problem] = fuse_problems(graph, named(graph, "up", "act"), named(graph, "act"), block, "torchscript")
    assert problem.found == (
        "TorchScript cannot call the module 'act' (Forked): its forward is more than a sequence of tensor operations"
    )


def test_compiled_region_around_a_checkpoint_is_refused() -> None:
    graph, by_name = straight()
    node = carve(graph, [by_name["a"]], [by_name["a"]], checkpointed("kept"))
    [problem] = fuse_problems(graph, [node, by_name["c"]], [by_name["c"]], Block(), "inductor")
    assert problem.found.startswith("'kept' (m.py:2) is recomputed in the backward pass")


def test_checkpoint_refuses_to_write_twice() -> None:
    graph, by_name = straight()
    by_name["c"].meta["mutates"] = [by_name["a"].meta["storage"]]
    assert not list(checkpoint_problems(graph, [by_name["a"], by_name["c"]]))
    [problem] = checkpoint_problems(graph, [by_name["c"]])
    assert problem == Problem(
        "'c' (m.py:4) writes in place to 'a', which is made outside: recomputing would write it twice",
        "leave 'c' out of the nodes, or take 'a' in",
    )


def test_label_says_what_the_nodes_do() -> None:
    graph = graph_of(Block())
    assert label_of(named(graph, "softmax", "dropout")) == "fused_softmax_dropout"
    assert label_of([*named(graph, "act", "size", "view"), graph.create_node("call_function", operator.add)]) == (
        "fused_act_view_add"
    )


class Sizes(nn.Module):
    """What is no tensor goes in and comes out of a region too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(2)])
        self.weight, self.weight_1, self.up = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        double = x.size(1) * 2
        ones = x.new_ones((double, 8), device=rest.device, dtype=rest.dtype)
        scaled = x * self.scale[0] + self.scale[1] * self.weight + self.up(rest) * self.weight_1
        masked = ones.masked_fill(ones > 0, float("-inf")).exp() + scaled.sum()
        return scaled, masked, rest.new_ones(double) * masked.sum()


def test_torchscript_takes_and_gives_sizes_devices_and_dtypes() -> None:
    module = Sizes().double()
    plain, graph = graph_of(module), graph_of(module)
    [double] = named(graph, "mul")
    double.meta["kind"] = "sym"
    names = "mul new_ones mul_1 mul_2 add up mul_3 add_1 gt masked_fill exp sum_1 add_2"
    nodes = named(graph, *names.split())
    outputs = outputs_of(graph, nodes)
    assert double in outputs
    assert not list(fuse_problems(graph, nodes, outputs, module, "torchscript"))
    node = carve(graph, nodes, outputs, compiled("all", module, "torchscript"))
    arguments = "size : int, x, x_1 : device, x_2 : int, x_3, x_4, weight, x_5, weight_1, attribute_0, attribute_1"
    assert f"def forward({arguments}):" in code_of(node.target.graph, "").text
    for length in (5, 7):
        torch.testing.assert_close(numbers(graph, module, length), numbers(plain, module, length))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), LlamaRMSNorm(8), nn.Dropout(0.5), nn.Dropout(0.5).eval(),
        nn.Softmax(-1), nn.Identity(), nn.Conv1d(4, 4, 1), *map(ACT2FN.__getitem__, ("gelu_pytorch_tanh", "gelu_10")),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_that_are_plain_tensor_operations_are_inlined(module: nn.Module) -> None:
    owner = nn.ModuleDict({"child": module})
    graph = call_of_child()
    assert inline_modules(graph, owner) == {}
    assert not graph.find_nodes(op="call_module")
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    assert torch.equal(compile_graph(graph, "owner")(owner, x), expected)


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.sum())


class GivesTwo(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def with_own_forward() -> nn.Module:
    module = nn.GELU()
    module.forward = torch.sin
    return module


def with_plan() -> nn.Module:
    module = nn.GELU()
    change_plan(module, Mesh(), checkpoint=True)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.BatchNorm1d(8), "its forward is more than a sequence of tensor operations"),
        (Counts(), "its forward is more than a sequence of tensor operations"),
        (ReadsValues(), "its forward cannot run on stand-ins: "),
        (GivesTwo(), "its forward returns a tuple"),
        (with_own_forward(), "it is called in a way of its own"),
        (with_plan(), "other primitives have changed how it runs"),
    ],
)
def test_modules_that_do_more_stay_calls(module: nn.Module, reason: str) -> None:
    graph = call_of_child()
    before = str(graph)
    assert inline_modules(graph, nn.ModuleDict({"child": module}))["child"].startswith(reason)
    assert str(graph) == before


def call_of_child() -> fx.Graph:
    graph = fx.Graph()
    graph.placeholder("self")
    graph.output(graph.call_module("child", (graph.placeholder("x"),)))
    return graph
