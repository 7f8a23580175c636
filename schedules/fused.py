"""Projections of one input as one matrix product, under their own names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from partbook.core import cat

QKV = ("q_proj", "k_proj", "v_proj")


class FusedLinear(nn.Linear):
    """Several linears of one input as one: weight (sum of ``sizes``, in).

    Its ``Part`` children of the surrounding module ask it in turn; the first to come with a new input computes for all.
    """

    def __init__(self, in_features: int, sizes: tuple[int, ...], bias: bool, **kwargs: Any) -> None:
        super().__init__(in_features, sum(sizes), bias, **kwargs)
        self.sizes = sizes
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Output ``index`` for ``x``; every part of one product is given out once, and then forgotten."""
        if self._input is not x or index not in self._waiting:
            self._input = x
            self._waiting = dict(enumerate(self(x).split(self.sizes, dim=-1)))
        found = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return found


class Part(nn.Module):
    """One of the linears that a ``FusedLinear`` computes."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a child: the weight has one path.
        self._fused, self.index = (fused,), index

    def forward(self, x: Tensor) -> Tensor:
        return self._fused[0].part(self.index, x)

    def extra_repr(self) -> str:
        return f"part {self.index} of a fused linear"


def fuse_qkv(attention: Any) -> nn.Module:
    """``attention`` with q_proj, k_proj and v_proj as one ``qkv_proj``; its own forward stays."""
    linears: list[nn.Linear] = [attention.get_submodule(name) for name in QKV]
    sizes = tuple(linear.out_features for linear in linears)
    first = linears[0]
    with torch.device("meta"):
        fused = FusedLinear(first.in_features, sizes, first.bias is not None, dtype=first.weight.dtype)
    new = copy.copy(attention)
    new._modules = {**attention._modules, **{name: Part(fused, i) for i, name in enumerate(QKV)}, "qkv_proj": fused}
    return new


def qkv_mapping(attention: Any) -> dict[str, Any]:
    """What ``qkv_proj`` is made of."""
    names = [name for name, _ in attention.q_proj.named_parameters()]
    return {f"qkv_proj.{name}": cat([f"{part}.{name}" for part in QKV]) for name in names}
