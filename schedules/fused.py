"""Projections of one input as one matrix product, under their own names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partbook.core import Schedule, cat, is_tracing

from .parallel import column

# What the families call them.
QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
KV = (("k", "v"),)
GATE_UP = (("gate_proj", "up_proj"), ("wi_0", "wi_1"))
Names = tuple[tuple[str, ...], ...]


class FusedLinear(nn.Linear):
    """Several linears of one input as one: weight (sum of ``sizes``, in).

    Its ``Part`` siblings ask it in turn; the first to come with a new input computes for all.
    """

    def __init__(self, in_features: int, sizes: tuple[int, ...], bias: bool, **kwargs: Any) -> None:
        super().__init__(in_features, sum(sizes), bias, **kwargs)
        self.sizes = sizes
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Output ``index`` for ``x``; every part of one product is given out once, and then forgotten."""
        if is_tracing():
            # Each sibling is run by itself then, more than once, and on tensors that have no memory to compare.
            return self(x).split(self.sizes, dim=-1)[index]
        if index not in self._waiting or not _same(self._input, x):
            self._input = x
            self._waiting = dict(enumerate(self(x).split(self.sizes, dim=-1)))
        found = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return found


def _same(known: Tensor | None, x: Tensor) -> bool:
    """Whether two siblings were called with one tensor; backward hooks on modules hand each a view of its own."""
    if known is None or known is x:
        return known is x
    if known.is_inference() or x.is_inference() or known.requires_grad != x.requires_grad:
        return False
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in (known, x)]
    return places[0] == places[1]


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


def fuse_qkv(attention: nn.Module) -> nn.Module:
    """``attention`` with its three projections as one ``qkv_proj``; its own forward stays."""
    return _fuse(attention, QKV, "qkv_proj")


def fuse_kv(attention: nn.Module) -> nn.Module:
    """A cross-attention, whose keys and values read another tensor than its queries, with one ``kv_proj``."""
    return _fuse(attention, KV, "kv_proj")


def fuse_gate_up(mlp: nn.Module) -> nn.Module:
    """``mlp`` with its gate and up projection as one ``gate_up_proj``; its own forward stays."""
    return _fuse(mlp, GATE_UP, "gate_up_proj")


def _fuse(module: nn.Module, known: Names, into: str) -> nn.Module:
    names = _names(module, known)
    linears: list[Any] = [module.get_submodule(name) for name in names]
    sizes, first = tuple(linear.out_features for linear in linears), linears[0]
    with torch.device("meta"):
        fused = FusedLinear(first.in_features, sizes, first.bias is not None, dtype=first.weight.dtype)
    new = copy.copy(module)
    new._modules = {**module._modules, **{name: Part(fused, i) for i, name in enumerate(names)}, into: fused}
    return new


def _names(module: nn.Module, known: Names) -> tuple[str, ...]:
    return next(names for names in known if all(name in module._modules for name in names))


def mapping(module: nn.Module, known: Names, into: str) -> dict[str, Any]:
    """What the fused linear of ``module`` is made of."""
    names = _names(module, known)
    parameters = [name for name, _ in module.get_submodule(names[0]).named_parameters()]
    return {f"{into}.{parameter}": cat([f"{name}.{parameter}" for name in names]) for parameter in parameters}


def fuse(node: Schedule, make: Callable[[nn.Module], nn.Module]) -> None:
    """Replace ``node`` by what ``make``, one of the three above, makes of it."""
    known = {fuse_qkv: (QKV, "qkv_proj"), fuse_kv: (KV, "kv_proj"), fuse_gate_up: (GATE_UP, "gate_up_proj")}
    node.replace(make, mapping(node.module, *known[make]))


def fused_column(fused: Schedule) -> None:
    """Split a fused linear along its output, each of its parts by itself."""
    sizes = fused.module.sizes
    column(fused, segments=sizes)
    fused.set_attribute("sizes", tuple(size // fused.mesh.tp for size in sizes))
