"""The collectives of tensor parallelism with their backward, over a group that is passed in.

Forward and backward of each pair are conjugate (Megatron-LM, arXiv:1909.08053, fig. 3; sequence parallelism:
arXiv:2205.05198, fig. 5). The functional collectives of torch are used, which torch.compile understands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional  # noqa: F401  (registers the operators)

_ops = torch.ops._c10d_functional
_is_tracing = False


@contextmanager
def pretended() -> Iterator[None]:
    """Inside, collectives give tensors of the right shapes and communicate nothing: for a run on fake tensors."""
    global _is_tracing
    before, _is_tracing = _is_tracing, True
    try:
        yield
    finally:
        _is_tracing = before


def is_tracing() -> bool:
    return _is_tracing


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's ``x``; no backward."""
    if _is_tracing:
        return torch.empty_like(x)
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


class Pending(NamedTuple):
    """A tensor that a collective is working on."""

    tensor: Tensor
    work: Any


class _Finished:
    """The handle of a collective that did not take place."""

    @staticmethod
    def wait() -> None:
        pass


def start_sum_(x: Tensor, group: ProcessGroup) -> Pending:
    """Begin ``sum_over`` in place; ``finish`` waits for it. ``x`` is contiguous and nobody else's; no backward."""
    if _is_tracing:
        return Pending(x, _Finished)
    if torch.compiler.is_compiling():
        # The compiler takes functional collectives only, and makes them in-place and asynchronous itself.
        return Pending(_ops.all_reduce(x, "sum", group.group_name), None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def finish(pending: Pending) -> Tensor:
    """The tensor, once its collective is complete."""
    if pending.work is None:
        return _ops.wait_tensor(pending.tensor)
    pending.work.wait()
    return pending.tensor


def max_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The elementwise maximum of every rank's ``x``; no backward."""
    if _is_tracing:
        return torch.empty_like(x)
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group.group_name))


def gather_parts(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's ``x`` in rank order; no backward."""
    size = group.size()
    if _is_tracing:
        return [torch.empty_like(x) for _ in range(size)]
    stacked = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous().view(-1), size, group.group_name))
    return list(stacked.view(size, *x.shape).unbind())


def _gather(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    return torch.cat(gather_parts(x, group), dim=axis)


def _scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    if x.shape[axis] % group.size():
        raise ValueError(
            f"dim {axis} of a tensor {list(x.shape)} does not divide by {group.size()} ranks; "
            "with sequence parallelism the sequence length must be a multiple of tp"
        )
    return x.chunk(group.size(), dim=axis)[group.rank()].contiguous()


def _reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    if x.shape[axis] % group.size():
        _scatter(x, axis, group)  # raises
    if _is_tracing:
        return torch.empty_like(x.chunk(group.size(), dim=axis)[0])
    stacked = torch.cat(x.chunk(group.size(), dim=axis)) if axis % x.ndim else x.contiguous()
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


class _Pair(torch.autograd.Function):
    """One collective forward, another one backward; either may be the identity."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        out = forward(x)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grad), None, None


def pair(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)`` whose gradient is ``backward(grad)``."""
    return _Pair.apply(x, forward, backward)


def _identity(x: Tensor) -> Tensor:
    return x


def reduce_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks forward, identity backward: leaves a parallel region (Megatron's g)."""
    return pair(x, lambda t: sum_over(t, group), _identity)


class _ReduceInPlace(torch.autograd.Function):
    """``reduce_forward`` without a copy, for a tensor that nothing else holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return finish(start_sum_(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def reduce_forward_(x: Tensor, group: ProcessGroup) -> Tensor:
    """``reduce_forward`` in place. ``x`` is contiguous, and no backward needs it as it was."""
    return reduce_forward(x, group) if torch.compiler.is_compiling() else _ReduceInPlace.apply(x, group)


def reduce_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, sum of the gradients over the ranks backward: enters a parallel region (Megatron's f)."""
    return pair(x, _identity, lambda grad: sum_over(grad, group))


def gather_into_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """All-gather along ``axis`` forward, reduce-scatter backward: the consumer is parallel, its gradients partial."""
    return pair(x, lambda t: _gather(t, axis, group), lambda grad: _reduce_scatter(grad, axis, group))


def gather_into_replicated(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """All-gather along ``axis`` forward, own slice backward: the consumer does the same on every rank."""
    return pair(x, lambda t: _gather(t, axis, group), lambda grad: _scatter(grad, axis, group))


def scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Own slice along ``axis`` forward, all-gather of the gradients backward."""
    return pair(x, lambda t: _scatter(t, axis, group), lambda grad: _gather(grad, axis, group))


def reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Reduce-scatter along ``axis`` forward, all-gather backward."""
    return pair(x, lambda t: _reduce_scatter(t, axis, group), lambda grad: _gather(grad, axis, group))


def broadcast_all(
    pairs: Iterator[tuple[str, Tensor]] | None, source: int, group: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of the group's rank ``source``, which passes them, on every rank of the group."""
    while True:
        pair = None if pairs is None else next(pairs, None)
        header: list[Any] = [None if pair is None else (pair[0], pair[1].shape, pair[1].dtype, pair[1].device.type)]
        dist.broadcast_object_list(header, group=group, group_src=source)
        if header[0] is None:
            return
        name, shape, dtype, device = header[0]
        sent = torch.empty(shape, dtype=dtype, device=device) if pair is None else pair[1].contiguous()
        dist.broadcast(sent, group=group, group_src=source)
        yield name, sent
