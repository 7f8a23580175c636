"""How one parameter is laid out over the tp ranks: which slices each rank holds, and how they make the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The split of one parameter of full ``shape`` along ``axis``.

    ``segments`` are sizes along ``axis`` that are split each by itself (q, k and v of a fused projection). With
    ``replicas`` > 1 every slice is held by that many neighbouring ranks (kv heads fewer than ranks). ``padding`` rows
    of zeros make a vocabulary divide; they exist on ranks only and never in a full tensor.
    """

    axis: int
    shape: tuple[int, ...]
    segments: tuple[int, ...]
    degree: int
    replicas: int = 1
    padding: int = 0

    @property
    def slices(self) -> int:
        """How many different slices there are; ``degree`` unless they are replicated."""
        return self.degree // self.replicas

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The [start, stop) along ``axis`` that ``rank`` holds, one for each segment, in the unpadded full tensor."""
        index, offset, found = rank // self.replicas, 0, []
        for segment in self.segments:
            step = (segment + self.padding) // self.slices
            found.append((offset + min(index * step, segment), offset + min((index + 1) * step, segment)))
            offset += segment
        return found

    def local_size(self) -> int:
        """The size along ``axis`` that every rank holds, padding included."""
        return sum((segment + self.padding) // self.slices for segment in self.segments)

    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], self.local_size(), *self.shape[self.axis + 1 :])

    def is_first_replica(self, rank: int) -> bool:
        """True on the one rank that counts a slice where each slice must count once (gradient norms)."""
        return rank % self.replicas == 0

    def split(self, full: Tensor, rank: int, axis: int | None = None) -> Tensor:
        """``rank``'s slice of ``full``, which may be any tensor laid out like the parameter along ``axis``."""
        axis = self.axis if axis is None else axis
        return self.assemble([full.narrow(axis, start, stop - start) for start, stop in self.ranges(rank)], axis)

    def assemble(self, pieces: Sequence[Tensor], axis: int | None = None) -> Tensor:
        """This rank's slice from the ``pieces`` that ``ranges`` names; adds the padding."""
        axis = self.axis if axis is None else axis
        missing = self.local_size() - sum(piece.shape[axis] for piece in pieces)
        if missing:
            shape = list(pieces[0].shape)
            shape[axis] = missing
            pieces = [*pieces, pieces[0].new_zeros(shape)]
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)

    def merge(self, locals_: Sequence[Tensor], axis: int | None = None) -> Tensor:
        """The full tensor from the slices of all ranks in order; replicas count once, padding is dropped."""
        axis = self.axis if axis is None else axis
        if len(locals_) == 1:
            return locals_[0]
        distinct = locals_[:: self.replicas]
        sizes = [(segment + self.padding) // self.slices for segment in self.segments]
        by_rank = [part.split(sizes, dim=axis) for part in distinct]
        whole = torch.cat([parts[i] for i in range(len(sizes)) for parts in by_rank], dim=axis)
        return whole.narrow(axis, 0, sum(self.segments)) if self.padding else whole

    def __str__(self) -> str:
        text = f"dim {self.axis} of {list(self.shape)} over {self.degree}"
        if len(self.segments) > 1:
            text += f", segments {list(self.segments)}"
        if self.replicas > 1:
            text += f", {self.replicas} replicas"
        return text + (f", {self.padding} padded" if self.padding else "")
