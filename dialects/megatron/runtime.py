"""Megatron's random streams and recomputation in the place of the core's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partbook.core import rng
from partbook.core.execution import Forward, change_plan, plan_of

# The states of the default stream around the forked regions that are entered.
_defaults: list[Tensor] = []


def use_runtime(model: nn.Module) -> None:
    """Have ``fork_rng`` run on Megatron's tracker, and ``checkpoint`` by its recomputation."""
    for module in model.modules():
        plan = plan_of(module)
        if plan is not None and (plan.checkpoint or plan.random != "default"):
            change_plan(module, plan.mesh, streams=STREAMS, recompute=recompute)


@contextmanager
def forked(tp_rank: int) -> Iterator[None]:
    """Run on the tracker's model-parallel stream, which differs between the tp ranks."""
    _defaults.append(_get_state())
    try:
        with random.get_cuda_rng_tracker().fork():
            yield
    finally:
        # The tracker has put the default stream where the region began; what ran on it inside has drawn since.
        _set_state(_defaults.pop())


@contextmanager
def shared() -> Iterator[None]:
    """Inside a forked region: run on the default stream again, for replicated activations."""
    if not _defaults:
        yield
        return
    own = _get_state()
    outer = _defaults.pop()
    _set_state(outer)
    try:
        yield
    finally:
        _defaults.append(_get_state())
        _set_state(own)


STREAMS = rng.Streams(forked, shared)


def _get_state() -> Tensor:
    return random._get_cuda_rng_state(graph_safe=_is_graph_safe())


def _set_state(state: Tensor) -> None:
    random._set_cuda_rng_state(state, graph_safe=_is_graph_safe())


def _is_graph_safe() -> bool:
    return random.is_graph_safe_cuda_rng_tracker(random.get_cuda_rng_tracker())


def recompute(run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor_parallel.checkpoint``, for any arguments and outputs: it takes and gives tensors only.

    torch's own would not replay the tracker's streams.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    if not any(tensor.requires_grad for tensor in tensors):
        # Its output would take no gradient, and the parameters get none.
        first = next((i for i, tensor in enumerate(tensors) if tensor.is_floating_point()), None)
        if first is None:
            return run(*args, **kwargs)
        tensors[first] = tensors[first].detach().requires_grad_()
    others: list[Any] = []
    replayed = rng.replayed(run, _defaults)

    def on_tensors(*given: Tensor) -> tuple[Tensor, ...]:
        for place, tensor in zip(places, given, strict=True):
            leaves[place] = tensor
        inner_args, inner_kwargs = pytree.tree_unflatten(leaves, spec)
        for place in places:
            leaves[place] = None
        found, found_spec = pytree.tree_flatten(replayed(*inner_args, **inner_kwargs))
        others[:] = [found_spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found]]
        return tuple(leaf for leaf in found if isinstance(leaf, Tensor))

    results = iter(tensor_parallel.checkpoint(on_tensors, False, *tensors))
    found_spec, found = others
    return pytree.tree_unflatten([next(results) if leaf is _TENSOR else leaf for leaf in found], found_spec)


# Stands for a tensor among the outputs of a recomputed module.
_TENSOR = object()
