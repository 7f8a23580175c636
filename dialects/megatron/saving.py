"""Parameters of a scheduled model in Megatron's distributed checkpoints, under the names and shapes of the model.

What a schedule fused, transposed and split is taken apart, so a checkpoint loads at any tp and pp, and under another
schedule of the same model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from torch import Tensor

from partbook.core import Layout, ScheduledModel
from partbook.core.primitives.shard import Shard
from partbook.core.weights import Cat, Expression, Source, Transpose

Shapes = Mapping[str, tuple[int, ...]]


def sharded_state_dict(stage: Any, prefix: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """{prefix + name in the stage: what Megatron saves of it}, for a ``StageModel``."""
    scheduled, group = stage.scheduled, (metadata or {}).get("dp_cp_group") or stage.pg_collection.dp_cp
    names = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
    flexible = _flexible(scheduled)
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in stage.inner.state_dict(keep_vars=True).items():
        known = names.get(id(tensor))
        if id(tensor) in seen:
            # The optimizer knows a parameter by one entry; loading fills the other names with it.
            found[prefix + name] = LocalNonpersistentObject(tensor)
            continue
        seen.add(id(tensor))
        if known is None:
            # A buffer: equal on all ranks.
            replica = (0, scheduled.mesh.tp_rank, group.rank())
            found[prefix + name] = ShardedTensor.from_rank_offsets(prefix + name, tensor, replica_id=replica)
            continue
        layout, expression = scheduled.layouts.get(known), scheduled.weights[known]
        place = scheduled.mesh.tp_rank if layout is None else scheduled.mesh.tp_rank % layout.replicas
        is_flexible = not flexible.isdisjoint(expression.names())
        saved = Saved(expression, layout, scheduled.mesh.tp_rank, scheduled.original.shapes, is_flexible)
        found[prefix + name] = saved.entry(prefix, tensor, (int(scheduled.is_copy(known)), place, group.rank()))
    return found


def _flexible(scheduled: ScheduledModel) -> set[str]:
    """The original parameters that a mesh may pad, so that those of another have another size."""
    steps = [(step.path, step.primitive) for step in scheduled.history]
    names = [f"{path}.{one.param}".lstrip(".") for path, one in steps if isinstance(one, Shard) and one.pad]
    return {scheduled.ties.get(name, name) for name in names}


@dataclass(frozen=True)
class Piece:
    """A block of one original tensor: ``size`` long along ``axis``, starting at ``start`` of ``whole``."""

    name: str
    axis: int
    start: int
    size: int
    whole: int

    def sharded(self, prefix: str, tensor: Tensor, replica: tuple[int, ...], flexible: bool) -> ShardedTensor:
        offset = (self.axis, self.start // self.size, self.whole // self.size)
        offsets = [offset] if self.whole != self.size else []
        return ShardedTensor.from_rank_offsets(
            prefix + self.name, tensor, *offsets, replica_id=replica, allow_shape_mismatch=flexible
        )


@dataclass(frozen=True)
class Saved:
    """How a present parameter is taken apart into blocks of original tensors, and put together again."""

    expression: Expression
    layout: Layout | None
    rank: int
    shapes: Shapes
    is_flexible: bool

    def entry(self, prefix: str, parameter: Tensor, replica: tuple[int, ...]) -> Any:
        """A ShardedTensor, or the factory of several; the optimizer makes the same of its states."""
        pieces = [piece for piece, _ in self._take_apart(parameter)]
        flexible = self.is_flexible
        if isinstance(self.expression, Source) and len(pieces) == 1:
            return pieces[0].sharded(prefix, parameter, replica, flexible)
        first = next(self.expression.names())

        def build(key: str, data: Tensor, replica: Any, flattened_range: Any) -> list[ShardedTensor]:
            before = key.removesuffix(first)
            return [
                piece.sharded(before, tensor.contiguous(), replica, flexible)
                for piece, tensor in self._take_apart(data)
            ]

        return ShardedTensorFactory(prefix + first, parameter, build, self._put_together, replica)

    def _take_apart(self, local: Tensor) -> list[tuple[Piece, Tensor]]:
        if self.layout is None:
            return [
                (Piece(name, 0, 0, full := _length(self.shapes[name]), full), tensor)
                for name, tensor in self.expression.invert(local, self.shapes)
            ]
        blocks = _blocks(self.expression, self.layout.axis, self.layout.segments, self.shapes)
        return list(self._pieces(blocks, local))

    def _pieces(self, blocks: Any, local: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """In the order of the local tensor."""
        for expression, axis, segments, narrow in blocks:
            name, own_axis, tensor = _source(expression, axis, narrow(self, local))
            sizes = [(segment + self._padding) // self._slices for segment in segments]
            starts = [begin + self._index * size for begin, size in zip(_sums(segments), sizes, strict=True)]
            # Megatron knows regular grids: where segments differ, blocks of a size that divides them all.
            unit = math.gcd(*sizes, *starts) if len(sizes) > 1 else sizes[0]
            places = [start + i for start, size in zip(starts, sizes, strict=True) for i in range(0, size, unit)]
            whole = sum(segments) + self._padding
            for place, part in zip(places, tensor.split(unit, dim=own_axis), strict=True):
                yield Piece(name, own_axis, place, unit, whole), part

    def _put_together(self, loaded: list[Tensor]) -> Tensor:
        tensors = iter(loaded)
        if self.layout is None:
            return _made(self.expression, {name: next(tensors) for name in self.expression.names()})
        counts = [(piece.name, piece.axis) for piece, _ in self._take_apart(self._empty())]
        by_name: dict[str, list[Tensor]] = {}
        axes = dict(counts)
        for (name, _), tensor in zip(counts, tensors, strict=True):
            by_name.setdefault(name, []).append(tensor)
        return _made(self.expression, {name: torch.cat(parts, axes[name]) for name, parts in by_name.items()})

    def _empty(self) -> Tensor:
        assert self.layout is not None
        return torch.empty(self.layout.local_shape(), device="meta")

    @property
    def _padding(self) -> int:
        return self.layout.padding if self.layout else 0

    @property
    def _slices(self) -> int:
        return self.layout.slices if self.layout else 1

    @property
    def _index(self) -> int:
        return self.rank // self.layout.replicas if self.layout else 0


def _blocks(expression: Expression, axis: int, segments: tuple[int, ...], shapes: Shapes) -> list[Any]:
    """(an original tensor or its transpose, the axis of its split, its segments, how to find it in a local tensor)."""
    if not isinstance(expression, Cat):
        return [(expression, axis, segments, lambda saved, local: local)]
    found, begin, rest = [], 0, list(segments)
    for part in expression.parts:
        size = part.shape(shapes)[expression.dim]
        if expression.dim != axis:
            found.append((part, axis, segments, _narrow(expression.dim, begin, size, split=False)))
        else:
            own = _first(rest, size)
            del rest[: len(own)]
            found.append((part, axis, own, _narrow(axis, begin, size, split=True)))
        begin += size
    return found


def _narrow(dim: int, begin: int, size: int, split: bool) -> Any:
    def narrow(saved: Saved, local: Tensor) -> Tensor:
        slices = saved._slices if split else 1
        return local.narrow(dim, begin // slices, size // slices)

    return narrow


def _first(segments: list[int], size: int) -> tuple[int, ...]:
    """The leading segments that make up ``size``."""
    sums = list(itertools.accumulate(segments))
    return tuple(segments[: sums.index(size) + 1])


def _source(expression: Expression, axis: int, tensor: Tensor) -> tuple[str, int, Tensor]:
    if isinstance(expression, Transpose):
        return _source(expression.part, 1 - axis, tensor.t())
    if isinstance(expression, Source):
        return expression.name, axis, tensor
    raise ValueError(f"a parameter that is made by {expression} cannot be saved by Megatron")


def _made(expression: Expression, tensors: Mapping[str, Tensor]) -> Tensor:
    if isinstance(expression, Source):
        return tensors[expression.name]
    if isinstance(expression, Transpose):
        return _made(expression.part, tensors).t().contiguous()
    assert isinstance(expression, Cat)
    return torch.cat([_made(part, tensors) for part in expression.parts], expression.dim)


def _sums(segments: tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(segments)][:-1]


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
