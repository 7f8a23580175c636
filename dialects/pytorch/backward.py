"""The backward of a stage in two halves: the gradients of what it received at once, those of its parameters later.

The gradient of a parameter needs what arrives at the node where its path meets that of the inputs. The first half runs
along the inputs' path and keeps what arrives there; the second goes on from there. A parameter whose path meets theirs
at several nodes, or nowhere, belongs to the first half: a decoder that starts in a stage which receives an encoder's
output has such. torch's own halves (2.13, ``pipelining/_backward.py``) fail on them or lose their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure
from torch.utils.checkpoint import GraphExecGroup

Gradients = tuple[Tensor | None, ...]


@dataclass
class Remainder:
    """Parameters whose paths meet that of the inputs at ``node``, and what arrived there."""

    node: Node
    parameters: list[nn.Parameter] = field(default_factory=list)
    arrived: Gradients = ()

    def keep(self, arrived: Gradients) -> None:
        self.arrived = arrived


def backward_of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, inputs: Sequence[Any],
    parameters: Iterable[nn.Parameter],
) -> tuple[Gradients, list[Remainder]]:  # fmt: skip
    """(the gradient of each input, what is left to do). Without ``gradients`` the outputs are a loss."""
    arriving = [torch.ones_like(tensor) for tensor in outputs] if gradients is None else gradients
    ends = [(tensor, gradient) for tensor, gradient in zip(outputs, arriving, strict=True) if tensor.requires_grad]
    wanted: list[Tensor] = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    at_once, left = _divide([tensor for tensor, _ in ends], wanted, parameters)
    if ends and (wanted or at_once):
        with _keeping(left):
            tensors, given = zip(*ends, strict=True)
            torch.autograd.backward(tensors, given, retain_graph=bool(left), inputs=[*wanted, *at_once])
    for tensor in outputs:
        # The second half starts inside: what is only around it may go.
        tensor.detach_()
    found = []
    for tensor in inputs:
        found.append(tensor.grad if isinstance(tensor, Tensor) else None)
        if isinstance(tensor, Tensor):
            tensor.grad = None
    return tuple(found), left


def backward_of_parameters(left: list[Remainder]) -> None:
    """Add to the gradients of the parameters what the first half has left to do."""
    # A checkpointed module recomputes once for all of them.
    with GraphExecGroup():
        while left:
            one = left.pop()
            edges = [
                (GradientEdge(one.node, i), gradient) for i, gradient in enumerate(one.arrived) if gradient is not None
            ]
            if edges:
                tensors, given = zip(*edges, strict=True)
                torch.autograd.backward(tensors, given, inputs=one.parameters)


def _divide(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Iterable[nn.Parameter]
) -> tuple[list[nn.Parameter], list[Remainder]]:
    """Of the parameters that the outputs depend on, those of the first half and those of the second."""
    users = construct_reverse_graph([_node(tensor) for tensor in outputs])
    path, _ = reverse_closure([_node(tensor) for tensor in inputs], set(), users)
    at_once: list[nn.Parameter] = []
    left: dict[Node, Remainder] = {}
    for parameter in parameters:
        start = _node(parameter) if parameter.requires_grad else None
        if start is None or start not in users:
            continue
        _, met = reverse_closure([start], path, users)
        if len(met) == 1:
            [node] = met
            left.setdefault(node, Remainder(node)).parameters.append(parameter)
        else:
            at_once.append(parameter)
    return at_once, list(left.values())


@contextmanager
def _keeping(left: Sequence[Remainder]) -> Iterator[None]:
    handles = [one.node.register_prehook(one.keep) for one in left]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _node(tensor: Tensor) -> Node:
    return get_gradient_edge(tensor).node
