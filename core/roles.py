"""What splitting a parameter means for the module that owns it: column, row or vocabulary parallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .execution import change_plan, original_class
from .layout import Layout
from .mesh import Mesh

# What a module's output is on one rank: a slice of its last dim, a part of a sum over the ranks, or complete.
Output = Literal["split", "partial", "whole"]


@dataclass(frozen=True)
class Kind:
    """A module type that multiplies by ``weight``: its output and input dim, and the attributes of their sizes."""

    out_dim: int
    in_dim: int
    out_size: str
    in_size: str


_LINEAR = Kind(0, 1, "out_features", "in_features")
# transformers' Conv1D keeps its weight as (in, out)
_CONV1D = Kind(1, 0, "nf", "nx")
# Looking up is multiplying by one-hot rows: splitting the rows leaves partial sums, splitting the columns a slice.
_EMBEDDING = Kind(1, 0, "embedding_dim", "num_embeddings")


def kind_of(module: nn.Module) -> Kind | None:
    """None as well for a subclass with a forward of its own, such as an embedding that scales what it looks up."""
    for cls, kind in _kinds():
        if isinstance(module, cls):
            return kind if original_class(module).forward is cls.forward else None
    return None


def differs(module: nn.Module) -> type[nn.Module] | None:
    """The class with a rule that the module is a subclass of, with a forward of its own to which it does not apply."""
    return next((cls for cls, _ in _kinds() if isinstance(module, cls) and kind_of(module) is None), None)


def _kinds() -> Iterator[tuple[type[nn.Module], Kind]]:
    yield nn.Linear, _LINEAR
    yield nn.Embedding, _EMBEDDING
    # Looked up, not imported: a plain PyTorch model does not need transformers.
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        yield transformers.Conv1D, _CONV1D


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a product with ``weight`` and, maybe, a bias."""
    return kind_of(module) in (_LINEAR, _CONV1D)


def keeps_in_out(module: nn.Module) -> bool:
    """Whether the module keeps its weight as (in, out)."""
    return kind_of(module) is _CONV1D


def output_of(module: nn.Module, layout: Layout | None) -> Output | None:
    """What the module gives on one rank when its weight has ``layout``; None for a module type without a known rule."""
    kind = kind_of(module)
    if kind is None:
        return None
    if layout is None:
        return "whole"
    return "split" if layout.axis == kind.out_dim else "partial"


def adapt(module: nn.Module, name: str, layout: Layout, mesh: Mesh) -> None:
    """Make ``module`` run on its slice of parameter ``name``."""
    kind = kind_of(module)
    if kind is None or name != "weight":
        return
    setattr(module, kind.out_size if layout.axis == kind.out_dim else kind.in_size, layout.local_size())
    if mesh.tp == 1 or layout.axis == kind.out_dim:
        return
    if kind is _EMBEDDING:
        change_plan(module, mesh, kernel=VocabularySlice(layout.ranges(mesh.tp_rank)[0], layout.shape[0]))
    else:
        change_plan(module, mesh, kernel=multiply_without_bias, deferred_bias=getattr(module, "bias", None) is not None)


def multiply_without_bias(module: Any, x: Tensor, with_bias: bool = False) -> Tensor:
    """The product of a linear alone; a kernel that leaves the bias to be added after the ranks' parts are."""
    return x @ module.weight if keeps_in_out(module) else functional.linear(x, module.weight)


@dataclass(frozen=True)
class VocabularySlice:
    """The embedding look-up of one rank: rows of its own slice, zeros for the ids of other ranks."""

    rows: tuple[int, int]
    vocabulary: int

    def __call__(self, module: nn.Embedding, ids: Tensor) -> Tensor:
        start, stop = self.rows
        inside = (ids >= 0) & (ids < self.vocabulary)
        # An id outside the vocabulary belongs to no rank: without this it would embed to zeros.
        torch._assert_async(inside.all(), f"a token id lies outside the vocabulary of {self.vocabulary}")
        elsewhere = (ids < start) | (ids >= stop)
        # Masked on the outside of the look-up: id 0 of the slice is a real token.
        rows = (ids - start).masked_fill(elsewhere, 0)
        found = functional.embedding(rows, module.weight, self._local_padding(module))
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    def _local_padding(self, module: nn.Embedding) -> int | None:
        start, stop = self.rows
        padding = module.padding_idx
        return padding - start if padding is not None and start <= padding < stop else None
