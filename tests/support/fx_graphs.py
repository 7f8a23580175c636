"""Small modules and their graphs, made with torch.fx's own tracer in the form that Partbook's tracer gives."""

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partbook.core.tracing.code import compile_graph


class Forked(nn.Module):
    """Python decides what it does, so only the module itself can run it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.dim() > 1 else x


class Block(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = activation or nn.GELU(approximate="tanh")
        self.drop, self.norm = nn.Dropout(0.3), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        up = self.act(self.up(x))
        down = self.drop(self.down(up))
        weights = F.dropout(F.softmax(down * self.scale, dim=-1), p=0.2, training=self.training)
        mixed = weights.view(x.size(0), -1) + rest.view(x.size(0), -1)
        return self.norm(mixed.view(x.size(0), x.size(1), 8)), weights


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


RANDOM = ("drop", F.dropout)


def graph_of(module: nn.Module) -> fx.Graph:
    """What the tracer of the package gives, made with fx's own for these simple modules."""
    graph = Leaves().trace(module)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("self")
    for i, node in enumerate(graph.nodes):
        node.meta = {"where": f"model.py:{i}", "storage": i, "random": node.target in RANDOM}
        if node.target == "size":
            node.meta["kind"] = "sym"
    return graph


def named(graph: fx.Graph, *names: str) -> list[fx.Node]:
    by_name = {node.name: node for node in graph.nodes}
    return [by_name[name] for name in names]


def between(graph: fx.Graph, first: str, last: str) -> list[fx.Node]:
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    names = [node.name for node in nodes]
    return [node for node in nodes[names.index(first) : names.index(last) + 1] if node.op != "get_attr"]


def numbers(graph: fx.Graph, module: nn.Module, length: int = 5) -> list[Tensor]:
    """Outputs and gradients, of the inputs and of every parameter."""
    torch.manual_seed(length)
    x, rest = (torch.randn(3, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs = compile_graph(graph, "test")(module, x, rest)
    weighted = sum((output * torch.rand_like(output)).sum() for output in outputs)
    assert isinstance(weighted, Tensor)
    return [*outputs, *torch.autograd.grad(weighted, [x, rest, *module.parameters()])]


def straight() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x -> a -> b -> c -> output, with b beside: one node of each kind of trouble is made of b."""
    graph = fx.Graph()
    graph.placeholder("self")
    x = graph.placeholder("x")
    a = graph.call_function(torch.sin, (x,), name="a")
    b = graph.call_function(torch.cos, (x,), name="b")
    c = graph.call_function(torch.add, (a, 1), name="c")
    graph.output([b, c])
    for i, node in enumerate(graph.nodes):
        node.meta = {"storage": i, "where": f"m.py:{i}"}
    return graph, {node.name: node for node in graph.nodes}
