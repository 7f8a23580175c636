"""A stand-in for the CUDA calls that megatron-core makes, for machines without CUDA: real code on gloo, for tests.

Nothing happens on import, and nothing where there is CUDA: ``on_cpu`` refuses to start there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

# Factories that megatron-core calls with device="cuda", torch.cuda.current_device() or pin_memory=True.
_FACTORIES = (
    "empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "tensor", "as_tensor",
    "arange", "rand", "randn", "randint",
)  # fmt: skip
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

_is_active = False


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Run megatron-core on the CPU inside; everything is as before afterwards.

    Raises RuntimeError where CUDA is there, and where it is active already.
    """
    global _is_active
    if torch.cuda.is_available():
        raise RuntimeError("megatron-core's stand-in for CUDA is for machines without it, and here CUDA is available")
    if _is_active:
        raise RuntimeError("on_cpu() is active already")
    with contextlib.ExitStack() as undo:
        put = functools.partial(_put, undo)
        _devices(put)
        _streams(put)
        _random(put)
        _tensors(put)
        _megatron(put)
        _is_active = True
        undo.callback(_deactivate)
        yield


def _deactivate() -> None:
    global _is_active
    _is_active = False


Put = Callable[[Any, str, Any], None]


def _put(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo``."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _devices(put: Put) -> None:
    cuda = torch.cuda
    # The index of "the" device; factories take it for the CPU, see _tensors.
    put(cuda, "current_device", lambda: 0)
    # torchrun's local rank.
    put(cuda, "set_device", lambda device: None)
    # The model parallel seeds and Megatron-LM's initialisation ask whether there is any.
    put(cuda, "device_count", lambda: 1)


def _streams(put: Put) -> None:
    """The CPU does one thing after the other."""
    cuda = torch.cuda
    put(cuda, "synchronize", lambda device=None: None)
    put(cuda, "Stream", _Stream)
    put(cuda, "Event", _Event)
    put(cuda, "current_stream", lambda device=None: _Stream())
    put(cuda, "default_stream", lambda device=None: _Stream())
    put(cuda, "set_stream", lambda stream: None)
    put(cuda, "stream", lambda stream: contextlib.nullcontext())


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(contextlib.nullcontext):
    device, cuda_stream = torch.device("cpu"), 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


def _random(put: Put) -> None:
    """CUDA's generator is the CPU's."""
    for owner in (torch.cuda, torch.cuda.random):
        put(owner, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
        put(owner, "get_rng_state", lambda device=None: torch.get_rng_state())
        put(owner, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))


def _tensors(put: Put) -> None:
    # torch lists the factories that ``with torch.device(...)`` applies to once, when it is first asked: it must list
    # its own, not the stand-ins, which call them.
    _device_constructors()
    for name in _FACTORIES:
        put(torch, name, _for_cpu(getattr(torch, name)))
    for name in _METHODS:
        put(Tensor, name, _for_cpu(getattr(Tensor, name)))
    put(Tensor, "to", _to(Tensor.to))
    put(Tensor, "cuda", lambda tensor, *_, **__: tensor)
    put(Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
    # The optimizers sort parameters by "torch.cuda.FloatTensor" and its like.
    put(Tensor, "type", _type(Tensor.type))


def _names_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        # A bare index names an accelerator.
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _for_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_the_cpu


def _to(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to_the_cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str | torch.device) and _names_cuda(args[0]):
            args = (torch.device("cpu"), *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return function(tensor, *args, **kwargs)

    return to_the_cpu


def _type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def type_on_cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = function(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_on_cuda


def _megatron(put: Put) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random

    # These two reach below torch.cuda's functions.
    put(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    put(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    # gloo reads a sent tensor later, and deallocate_pipeline_outputs takes its memory meanwhile: an alias keeps it.
    send = p2p_communication._p2p_ops
    put(p2p_communication, "_p2p_ops", lambda **kwargs: send(**{name: _alias(name, x) for name, x in kwargs.items()}))
    # Saves in the background report through a process that imports everything anew; here saves are waited for.
    put(filesystem_async, "_results_queue", queue.Queue())
    # That the CPU's stream moved in a region of the GPU's is true there whenever a number is drawn.
    put(logging.getLogger(random.__name__), "disabled", True)


def _alias(name: str, x: Any) -> Any:
    return x.detach() if name.startswith("tensor_send") and isinstance(x, Tensor) else x
