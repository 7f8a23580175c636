"""Random numbers under model parallelism: equal on replicated activations, different inside sharded regions and stages.

The default stream is equal on the ranks of one tp group and runs through replicated code. A *forked* region draws one
seed from it and runs on a stream of its own, seeded with that number and the tp rank; afterwards the default stream
goes on from where the draw left it. Nothing is kept between regions, so restoring the default stream, as
``torch.utils.checkpoint`` does before it recomputes, restores everything. The *stage* of a pipeline is such a region,
for which its stream is the default one: the scripts of all ranks draw the same, whatever their stages draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The default streams around the forked regions that are entered, the innermost last.
_shared_streams: list[list[Tensor]] = []


def get_streams() -> list[Tensor]:
    """The states of the default streams: the host's, and the accelerator's where there is one."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return states


def set_streams(states: list[Tensor]) -> None:
    """Put the default streams where ``get_streams`` found them."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module().set_rng_state(states[1])


@contextmanager
def forked(tp_rank: int) -> Iterator[None]:
    """Run on a stream that differs between the tp ranks."""
    _shared_streams.append(_branch(tp_rank))
    try:
        yield
    finally:
        set_streams(_shared_streams.pop())


@contextmanager
def of_stage(number: int) -> Iterator[None]:
    """Run on a stream that differs between ``number``s: those of the stages of a pipeline and their dp replicas."""
    default = _branch(number)
    try:
        yield
    finally:
        set_streams(default)


def _branch(number: int) -> list[Tensor]:
    """Seed the default streams with a draw from the host's and ``number``; gives their states after the draw."""
    # From the host's stream: no device synchronisation.
    seed = int(torch.randint(2**48, (), device="cpu"))
    states = get_streams()
    torch.manual_seed(seed * 1024 + number)
    return states


@contextmanager
def shared() -> Iterator[None]:
    """Inside a forked region: run on the default stream again, for replicated activations."""
    if not _shared_streams:
        yield
        return
    own = get_streams()
    outer = _shared_streams.pop()
    set_streams(outer)
    try:
        yield
    finally:
        _shared_streams.append(get_streams())
        set_streams(own)


def replayed(run: Callable[..., Any], around: list[Any] = _shared_streams) -> Callable[..., Any]:
    """``run`` for a recomputation: from its second run on, it finds the streams ``around`` it as its first run did.

    Recomputing restores the current stream, but happens when the forked regions around it are left.
    """
    before, has_run = list(around), False

    def again(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if not has_run:
            has_run = True
            return run(*args, **kwargs)
        entered = list(around)
        around[:] = before
        try:
            return run(*args, **kwargs)
        finally:
            around[:] = entered

    return again


class Streams(NamedTuple):
    """``forked(tp_rank)`` and ``shared()``, as this module has them or as a runtime does."""

    forked: Callable[[int], AbstractContextManager[None]]
    shared: Callable[[], AbstractContextManager[None]]


STREAMS = Streams(forked, shared)
