"""Sizes in a graph: a size that a forward computed, rebuilt from the sizes of the tensors that the graph has.

While a module is traced its sizes are symbols. How Python computed with them is not recorded; a size that reaches a
torch call is turned into nodes from its expression, so a graph holds for other sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class UnknownSize(Exception):
    """A size that is no size of any tensor in the graph."""


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of an int or a symbolic size."""
    return size.node.expr if isinstance(size, SIZES) else sympy.sympify(size)


class Sizes:
    """The sizes that are known in one graph, and the nodes that hold them."""

    def __init__(self, graph: fx.Graph, replace: Callable[[Any], Any]) -> None:
        # replace: the shape environment's, which applies the equalities that it has learnt
        self.graph, self.replace = graph, replace
        self._tensors: list[tuple[fx.Node, tuple[Any, ...]]] = []
        self._nodes: dict[Any, fx.Node] = {}
        self._tracer = fx.proxy.GraphAppendingTracer(graph)

    def add_tensor(self, node: fx.Node, shape: Any) -> None:
        if any(not isinstance(size, int) for size in shape):
            self._tensors.append((node, tuple(shape)))

    def add_number(self, node: fx.Node, size: Any) -> None:
        self._nodes.setdefault(self.replace(expression(size)), node)

    def build(self, wanted: Any) -> Any:
        """An int, float or bool, or the node that holds ``wanted``. Raises UnknownSize."""
        wanted = self.replace(sympy.sympify(wanted))
        if isinstance(wanted, sympy.logic.boolalg.BooleanAtom):
            return bool(wanted)
        if wanted.is_Integer:
            return int(wanted)
        if wanted.is_number:
            return float(wanted)
        known = self._find(wanted)
        if known is not None:
            return known
        if wanted.is_Symbol:
            raise UnknownSize(str(wanted))
        return self._compute(wanted)

    def _find(self, wanted: Any) -> fx.Node | None:
        if wanted in self._nodes:
            return self._nodes[wanted]
        for tensor, shape in self._tensors:
            for dim, size in enumerate(shape):
                if not isinstance(size, int) and self.replace(expression(size)) == wanted:
                    return self._keep(self.graph.call_method("size", (tensor, dim)), wanted)
        return None

    def _keep(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(size=value, kind="sym")
        self._nodes[value] = node
        return node

    def _compute(self, wanted: Any) -> Any:
        if isinstance(wanted, IntTrueDiv | FloatTrueDiv):
            # its reference asks for the size of its operands, which nodes do not have
            return self._keep(self.graph.call_function(operator.truediv, tuple(map(self.build, wanted.args))), wanted)
        values: dict[Any, Any] = {}
        operands = []
        for operand in wanted.args:
            if operand.is_number:
                operands.append(operand)
                continue
            built = self.build(operand)
            stand_in = sympy.Dummy(integer=operand.is_integer, positive=operand.is_positive)
            values[stand_in] = fx.Proxy(built, self._tracer) if isinstance(built, fx.Node) else built
            operands.append(stand_in)
        exact = {"evaluate": False} if wanted.is_Add or wanted.is_Mul or wanted.is_Pow else {}
        before = set(self.graph.nodes)
        result = sympy_interp(PythonReferenceAnalysis, values, wanted.func(*operands, **exact))
        for node in self.graph.nodes:
            if node not in before:
                node.meta.setdefault("kind", "sym")
        return self._keep(result.node, wanted) if isinstance(result, fx.Proxy) else result
