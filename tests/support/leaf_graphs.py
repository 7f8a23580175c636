"""Graphs to search: of small functions over a module with a few children, each of which stays one node."""

from torch import fx, nn

from partbook.core.patterns import find_pattern, nearest_miss


class Tracer(fx.Tracer):
    """All children stay one node each."""

    def is_leaf_module(self, m, module_qualified_name):
        return True


class Model(nn.Module):
    """A module with a few children that runs ``function(self, ...)``."""

    def __init__(self, function=None, **children):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.act = nn.GELU()
        for name, child in children.items():
            self.add_module(name, child)
        self.function = function


def graph_of(function, **children):
    """The graph of a function, which may take the module that owns the graph as ``m``."""
    model = Model(**children)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    arguments = ", ".join(name for name in names if name != "m")
    scope = {"function": function}
    exec(f"def forward(m, {arguments}): return function({', '.join(names)})", scope)
    type_ = type("Traced", (Model,), {"forward": scope["forward"]})
    model.__class__ = type_
    return Tracer().trace(model), model


def found(function, pattern, **children):
    return find_pattern(*graph_of(function, **children), pattern)


def missed(function, pattern, **children):
    graph, owner = graph_of(function, **children)
    assert find_pattern(graph, owner, pattern) == []
    return nearest_miss(graph, owner, pattern)


def names(nodes):
    return [getattr(node, "name", node) for node in nodes]


def shown(matches):
    """[(nodes, inputs, outputs)] by name."""
    return [tuple(map(names, (match.nodes, match.inputs, match.outputs))) for match in matches]
