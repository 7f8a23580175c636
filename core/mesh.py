"""The parallel layout: how many ranks there are along dp, pp and tp, and where this process stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from torch.distributed import ProcessGroup

Axis = Literal["dp", "pp", "tp"]


@dataclass(frozen=True)
class VirtualGroup:
    """The tp group of a virtual mesh: its size and this rank's place, for what only plans."""

    ranks: int
    place: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True)
class Mesh:
    """Sizes of the parallel axes and this process's global ``rank``; arithmetic only.

    Ranks of one tp group are neighbours, then dp, then pp, the order that DeepSpeed's and Megatron's grids share::

        rank = (pp_rank * dp + dp_rank) * tp + tp_rank

    A mesh without process groups is *virtual*: any rank's part of a model can be planned, counted and built in one
    process. A dialect makes the real one. Raises ValueError for a size below 1 or a rank outside the mesh.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    rank: int = 0
    tp_group: ProcessGroup | None = field(default=None, repr=False, compare=False)
    dp_group: ProcessGroup | None = field(default=None, repr=False, compare=False)
    # the ranks of one pipeline, by stage
    pp_group: ProcessGroup | None = field(default=None, repr=False, compare=False)
    # all ranks that hold one copy of the model: the same dp coordinate
    model_group: ProcessGroup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"Mesh({axis}={getattr(self, axis)}): a parallel size is at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} lies outside the mesh dp={self.dp} pp={self.pp} tp={self.tp}, "
                f"which has ranks 0 to {self.size - 1}"
            )

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp * self.dp)

    @property
    def is_virtual(self) -> bool:
        """True when ranks of one tp group cannot talk to each other from this process."""
        return self.tp > 1 and self.tp_group is None

    def group(self) -> Any:
        """The tp group, a ``VirtualGroup`` on a virtual mesh."""
        return VirtualGroup(self.tp, self.tp_rank) if self.is_virtual else self.tp_group

    def at(self, rank: int) -> Self:
        """The same sizes seen from ``rank``, virtual."""
        return replace(self, rank=rank, tp_group=None, dp_group=None, pp_group=None, model_group=None)

    def rank_groups(self, *axes: Axis) -> list[list[int]]:
        """The global ranks of every group along ``axes``, in the order in which every rank must create them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            there = self.at(rank)
            key = tuple(getattr(there, f"{other}_rank") for other in ("pp", "dp", "tp") if other not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Immutable, and process groups cannot be copied.
        return self
