"""The weight map: how each current parameter is made from the model's original parameters, and the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# read(name, axis, start, stop): those rows of one original parameter
Reader = Callable[[str, int, int, int], Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class Expression(ABC):
    """One current parameter in terms of original ones. Linear and invertible, so it maps gradients as well."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The parameters that it is made of."""

    @abstractmethod
    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The full shape, given those of the parameters that it is made of. Raises ValueError where they clash."""

    @abstractmethod
    def read(self, reader: Reader, shapes: Shapes, axis: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of ``axis`` of the full tensor, reading no more than they need."""

    @abstractmethod
    def invert(self, full: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """The original tensors out of the full one."""

    @abstractmethod
    def substitute(self, of: Mapping[str, Expression]) -> Expression:
        """The same expression with each name replaced by what ``of`` says that it is made of."""


@dataclass(frozen=True)
class Source(Expression):
    """An original parameter as it is."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        return shapes[self.name]

    def read(self, reader: Reader, shapes: Shapes, axis: int, start: int, stop: int) -> Tensor:
        return reader(self.name, axis, start, stop)

    def invert(self, full: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        yield self.name, full

    def substitute(self, of: Mapping[str, Expression]) -> Expression:
        return of[self.name]


@dataclass(frozen=True)
class Cat(Expression):
    """Several parameters side by side along ``dim``: q (8, 4), k (2, 4), v (2, 4) -> qkv (12, 4)."""

    parts: tuple[Expression, ...]
    dim: int = 0

    def names(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.names()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        parts = [list(part.shape(shapes)) for part in self.parts]
        others = {tuple(shape[: self.dim] + shape[self.dim + 1 :]) for shape in parts}
        if len(others) != 1:
            raise ValueError(f"cannot concatenate shapes {[tuple(shape) for shape in parts]} along dim {self.dim}")
        whole = parts[0].copy()
        whole[self.dim] = sum(shape[self.dim] for shape in parts)
        return tuple(whole)

    def read(self, reader: Reader, shapes: Shapes, axis: int, start: int, stop: int) -> Tensor:
        if axis != self.dim:
            return torch.cat([part.read(reader, shapes, axis, start, stop) for part in self.parts], self.dim)
        pieces: list[Tensor] = []
        offset = 0
        for part in self.parts:
            size = part.shape(shapes)[axis]
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high or (start == stop and not pieces):
                pieces.append(part.read(reader, shapes, axis, min(low, size), max(high, min(low, size))))
            offset += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def invert(self, full: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        sizes = [part.shape(shapes)[self.dim] for part in self.parts]
        for part, piece in zip(self.parts, full.split(sizes, dim=self.dim), strict=True):
            yield from part.invert(piece, shapes)

    def substitute(self, of: Mapping[str, Expression]) -> Expression:
        return Cat(tuple(part.substitute(of) for part in self.parts), self.dim)


@dataclass(frozen=True)
class Transpose(Expression):
    """A matrix transposed, as between ``Conv1D`` (in, out) and ``nn.Linear`` (out, in)."""

    part: Expression

    def names(self) -> Iterator[str]:
        return self.part.names()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        shape = self.part.shape(shapes)
        if len(shape) != 2:
            raise ValueError(f"cannot transpose shape {shape}: it is no matrix")
        return shape[::-1]

    def read(self, reader: Reader, shapes: Shapes, axis: int, start: int, stop: int) -> Tensor:
        return self.part.read(reader, shapes, 1 - axis, start, stop).t().contiguous()

    def invert(self, full: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        yield from self.part.invert(full.t(), shapes)

    def substitute(self, of: Mapping[str, Expression]) -> Expression:
        return Transpose(self.part.substitute(of))


def as_expression(value: Expression | str) -> Expression:
    return Source(value) if isinstance(value, str) else value


def cat(parts: Sequence[Expression | str], dim: int = 0) -> Cat:
    """For a ``mapping``: ``{"qkv.weight": cat(["q.weight", "k.weight", "v.weight"])}``."""
    return Cat(tuple(as_expression(part) for part in parts), dim)


def transpose(part: Expression | str) -> Transpose:
    """For a ``mapping``: ``{"weight": transpose("weight")}``."""
    return Transpose(as_expression(part))


def to_json(expression: Expression) -> dict[str, Any]:
    """As JSON values. Raises ValueError for an expression of another kind than these."""
    if isinstance(expression, Source):
        return {"source": expression.name}
    if isinstance(expression, Cat):
        return {"cat": [to_json(part) for part in expression.parts], "dim": expression.dim}
    if isinstance(expression, Transpose):
        return {"transpose": to_json(expression.part)}
    raise ValueError(f"a {type(expression).__name__} cannot be saved")


def from_json(content: Mapping[str, Any]) -> Expression:
    """What ``to_json`` saved."""
    if "source" in content:
        return Source(content["source"])
    if "cat" in content:
        return Cat(tuple(map(from_json, content["cat"])), content["dim"])
    return Transpose(from_json(content["transpose"]))
