"""A column-parallel product that sums its input gradient over the ranks while it computes its weight gradient.

As Megatron-LM's linear with asynchronous communication does (arXiv:2205.05198, and its tensor_parallel/layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from .collectives import finish, reduce_backward, start_sum_
from .mesh import Mesh


@dataclass(frozen=True)
class OverlappedColumn:
    """The kernel of a column-parallel module: x (..., in) -> (..., out/tp), its input gradient complete.

    ``transposed``: the weight is (in, out) instead of (out, in).
    """

    mesh: Mesh
    transposed: bool

    def __call__(self, module: Any, x: Tensor, with_bias: bool = True) -> Tensor:
        group = self.mesh.group()
        weight = module.weight.t() if self.transposed else module.weight
        bias = module.bias if with_bias else None
        # torch does not know autocast on the meta device, where a model may be traced
        is_autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if not x.requires_grad or is_autocast:
            # Autocast has its own product; without an input gradient there is nothing to sum.
            return functional.linear(reduce_backward(x, group) if x.requires_grad else x, weight, bias)
        return _Linear.apply(x, weight, bias, group)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = start_sum_(grad @ weight, ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return finish(grad_x), grad_weight, grad_bias, None
