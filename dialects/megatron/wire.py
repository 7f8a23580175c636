"""What crosses a boundary, in the one tensor that Megatron's schedules send: [s, b, h], or several tensors packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partbook.core import GuardError
from partbook.core.pipeline import Instance, Value


@dataclass(frozen=True)
class Wire:
    """One boundary. ``is_hidden``: the hidden state alone crosses it, in the shape that Megatron's schedules expect;
    ``dtype`` is that of all tensors on it, ``hidden`` its last dim.

    Several tensors travel flat, one after the other, in rows of ``hidden``: those that take a gradient converted to
    ``dtype``, the others by their bits.
    """

    is_hidden: bool
    hidden: int
    dtype: torch.dtype

    def pack(self, values: Sequence[Value], tensors: Sequence[Tensor], micro_batch: int) -> Tensor:
        """[b, s, h] -> [s, b, h], or any tensors -> [n, b, h]: no view, and with a gradient whenever grads are on.

        ``values`` are what the wiring of this batch sends. Megatron sends a gradient back for whatever it was sent.
        """
        anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        if self.is_hidden:
            self._refuse_more(values)
            return _Turned.apply(anchor, tensors[0], self.dtype)
        return _Packed.apply(anchor, self, tuple(values), micro_batch, *tensors)

    def unpack(self, values: Sequence[Value], wire: Tensor, instance: Instance) -> list[Tensor]:
        """What ``pack`` was given, of a micro-batch of ``instance``'s sizes."""
        if self.is_hidden:
            self._refuse_more(values)
            return [wire.transpose(0, 1).to(values[0].dtype).contiguous()]
        if wire.requires_grad and not any(value.requires_grad for value in values):
            # The stage before waits for a gradient, whether it uses one or not.
            wire.grad = torch.zeros_like(wire)
        return list(_Unpacked.apply(wire, self, tuple(values), [instance.shape(value) for value in values]))

    def _refuse_more(self, values: Sequence[Value]) -> None:
        if len(values) != 1:
            names = ", ".join(value.name for value in values)
            raise GuardError(
                f"{names} cross a boundary of this batch, where the hidden state alone did when it was cut"
            )


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.transpose(0, 1).to(dtype).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad.transpose(0, 1).to(ctx.dtype).contiguous(), None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, wire: Wire, values: Sequence[Value], micro_batch: int, *tensors: Tensor
    ) -> Tensor:
        ctx.wire, ctx.values, ctx.looks = wire, values, [(tensor.shape, tensor.dtype) for tensor in tensors]
        pieces = [_to_wire(tensor, value, wire) for tensor, value in zip(tensors, values, strict=True)]
        row = micro_batch * wire.hidden
        padding = -sum(piece.numel() for piece in pieces) % row
        pieces.append(pieces[0].new_zeros(padding))
        return torch.cat(pieces).view(-1, micro_batch, wire.hidden).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        flat, found = grad.reshape(-1), []
        offset = 0
        for value, (shape, dtype) in zip(ctx.values, ctx.looks, strict=True):
            length = _length(shape, value, ctx.wire)
            piece = flat[offset : offset + length]
            found.append(piece.view(shape).to(dtype) if value.requires_grad else None)
            offset += length
        return None, None, None, None, *found


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, wire: Wire, values: Sequence[Value], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, ...]:
        ctx.wire, ctx.values, ctx.shapes, ctx.look = wire, values, shapes, (packed.shape, packed.dtype)
        flat, offset, found = packed.detach().reshape(-1), 0, []
        for value, shape in zip(values, shapes, strict=True):
            length = _length(shape, value, wire)
            found.append(_from_wire(flat[offset : offset + length], value, shape))
            offset += length
        ctx.mark_non_differentiable(*(t for t, value in zip(found, values, strict=True) if not value.requires_grad))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        shape, dtype = ctx.look
        packed = torch.zeros(shape, dtype=dtype, device=grads[0].device)
        flat, offset = packed.view(-1), 0
        for grad, value, own in zip(grads, ctx.values, ctx.shapes, strict=True):
            length = _length(own, value, ctx.wire)
            if value.requires_grad:
                flat[offset : offset + length] = grad.reshape(-1).to(dtype)
            offset += length
        return packed, None, None, None


def _to_wire(tensor: Tensor, value: Value, wire: Wire) -> Tensor:
    if value.requires_grad:
        return tensor.reshape(-1).to(wire.dtype)
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([content, content.new_zeros(-content.numel() % wire.dtype.itemsize)]).view(wire.dtype)


def _from_wire(piece: Tensor, value: Value, shape: tuple[int, ...]) -> Tensor:
    if value.requires_grad:
        return piece.view(shape).to(value.dtype, copy=True)
    size = torch.Size(shape).numel() * value.dtype.itemsize
    return piece.clone().view(torch.uint8)[:size].clone().view(value.dtype).view(shape)


def _length(shape: Sequence[int], value: Value, wire: Wire) -> int:
    """How many elements of the wire a tensor takes."""
    count = torch.Size(shape).numel()
    return count if value.requires_grad else -(-count * value.dtype.itemsize // wire.dtype.itemsize)


def wires_of(instance: Instance, shape: tuple[int, int, int], params_dtype: torch.dtype) -> list[Wire]:
    """The boundaries of a pipeline, of ``instance``'s sizes, where a hidden state has ``shape`` [b, s, h]."""
    found = []
    for part in instance.wiring.parts[:-1]:
        one = part.sent[0]
        is_hidden = len(part.sent) == 1 and one.dtype.is_floating_point and instance.shape(one) == shape
        dtype = params_dtype
        for value in part.sent:
            if value.requires_grad or is_hidden:
                dtype = torch.promote_types(dtype, value.dtype)
        found.append(Wire(is_hidden, shape[2], dtype))
    return found
