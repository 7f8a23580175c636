"""What is exchanged in torch, and in transformers, while a model runs on fake tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..loss import VocabularyParallelLoss
from .constants import ask
from .symbols import SIZES

if TYPE_CHECKING:
    from .session import Session

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "barrier",
)  # fmt: skip
# as they are when nothing is patched
_LOSS = VocabularyParallelLoss.__call__
_APPLY = torch.autograd.Function.__dict__["apply"].__func__
# what is no attribute of the user's
_INTERNALS = (
    frozenset(vars(nn.Module())) - {"training"}
    # whether a block is recomputed is decided when it is called
    | {"forward", "_partbook_plan", "_partbook_steps", "gradient_checkpointing"}
)
# arguments of custom functions that a graph can hold
_IN_GRAPHS = (
    Tensor,
    *SIZES,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    tuple,
    list,
    dict,
    slice,
    range,
    torch.device,
    torch.finfo,
    type(...),
)
# what a class may say about its instances
_NUMBERS = (bool, int, float, str)


@contextmanager
def patched(session: Session) -> Iterator[None]:
    """Calls of modules, reads of their attributes, and the few things that a torch function mode does not see."""
    patches = _Patches()
    try:
        _modules(session, patches)
        _autograd(session, patches)
        _refused_calls(session, patches)
        _sizes(session, patches)
        _losses(session, patches)
        _modes(session, patches)
        _collectives(patches)
        for function in session.leaf_functions:
            _leaf_function(session, patches, function)
        _transformers(session, patches)
        yield
    finally:
        patches.undo()


class _Patches:
    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def on_undo(self, step: Callable[[], None]) -> None:
        self._undo.append(step)

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()


def _modules(session: Session, patches: _Patches) -> None:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return session.module_called(module, args, kwargs)

    def get(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _INTERNALS and name[:2] != "__":
            own = name in object.__getattribute__(module, "__dict__")
            if own or isinstance(value, _NUMBERS):
                session.attribute_read(module, name, value)
        return value

    def set_(module: nn.Module, name: str, value: Any) -> None:
        session.attribute_written(module, name)
        write(module, name, value)

    def delete(module: nn.Module, name: str) -> None:
        session.attribute_written(module, name)
        remove(module, name)

    write, remove = nn.Module.__setattr__, nn.Module.__delattr__
    patches.set(nn.Module, "__setattr__", set_)
    patches.set(nn.Module, "__delattr__", delete)
    patches.set(nn.Module, "__call__", call)
    patches.set(nn.Module, "__getattribute__", get)


def _autograd(session: Session, patches: _Patches) -> None:
    def custom(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Its inside is not looked into: it has a backward of its own.
        kept = tuple((i, value) for i, value in enumerate(args) if not isinstance(value, _IN_GRAPHS))
        places = {i for i, _ in kept}
        left = tuple(value for i, value in enumerate(args) if i not in places)
        return session.leaf_function(CustomFunction(cls, kept), left, kwargs)

    def is_grad_enabled() -> bool:
        if session.recorder is not None and not session.is_busy:
            session.recorder.conditions.gradients = True
        return torch._C.is_grad_enabled()

    patches.set(torch.autograd.Function, "apply", classmethod(custom))
    patches.set(torch, "is_grad_enabled", is_grad_enabled)


def _refused_calls(session: Session, patches: _Patches) -> None:
    """Calls that torch's function modes do not see, and that a graph cannot repeat."""

    def refused(function: Callable[..., Any], found: str, hint: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if session.recorder is not None and not session.is_busy:
                raise session.recorder.refusal(found, hint)
            return function(*args, **kwargs)

        return call

    recomputes = "it calls torch.utils.checkpoint itself", "trace the module that it recomputes instead"
    seeds = "it seeds the random numbers", "seed outside the model"
    for function, (found, hint) in ((torch.utils.checkpoint.checkpoint, recomputes), (torch.manual_seed, seeds)):
        _everywhere(patches, function, refused(function, found, hint))
    enter = torch.inference_mode.__enter__
    inference = "it enters inference mode", "torch.no_grad() is kept in a graph"
    patches.set(torch.inference_mode, "__enter__", refused(enter, *inference))


def _everywhere(patches: _Patches, function: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Exchange a function wherever a loaded module refers to it by its name."""
    for module in list(sys.modules.values()):
        # vars, not getattr: a lazy module would import what it is asked for
        if module is not None and getattr(module, "__dict__", {}).get(function.__name__) is function:
            patches.set(module, function.__name__, instead)


def _losses(session: Session, patches: _Patches) -> None:
    """A sharded loss is one call: its process group has no place in a graph."""

    def call(loss: VocabularyParallelLoss, *args: Any, **kwargs: Any) -> Any:
        return session.leaf_function(LossCall(loss), args, kwargs)

    patches.set(VocabularyParallelLoss, "__call__", call)


def _sizes(session: Session, patches: _Patches) -> None:
    """A size that the module's own Python shows as text or looks up is the number that it is."""
    show, text, unhashable = torch.SymInt.__repr__, torch.SymInt.__str__, torch.SymInt.__hash__

    def is_asked() -> bool:
        return session.recorder is not None and not session.is_busy

    patches.set(torch.SymInt, "__repr__", lambda size: repr(int(size)) if is_asked() else show(size))
    patches.set(torch.SymInt, "__str__", lambda size: str(int(size)) if is_asked() else text(size))
    patches.set(torch.SymInt, "__hash__", lambda size: hash(int(size)) if is_asked() else unhashable(size))


class LossCall:
    """A sharded loss as the target of a node."""

    def __init__(self, loss: VocabularyParallelLoss) -> None:
        self.loss = loss
        self.__name__ = self.__qualname__ = "vocabulary_parallel_loss"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _LOSS(self.loss, *args, **kwargs)


class CustomFunction:
    """One ``torch.autograd.Function`` as the target of a node; ``kept`` are (place, value) of the arguments that have
    no place in a graph: functions, process groups."""

    def __init__(self, function: Any, kept: tuple[tuple[int, Any], ...] = ()) -> None:
        self.function, self.kept = function, kept
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place, value in self.kept:
            given.insert(place, value)
        return _APPLY(self.function, *given, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and (self.function, self.kept) == (other.function, other.kept)

    def __hash__(self) -> int:
        return hash(self.function)


def _modes(session: Session, patches: _Patches) -> None:
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(autocast: Any) -> Any:
        recorder = session.recorder
        if recorder is not None and not session.is_busy:
            # the cache is off while a model is traced
            caches = session.untouched.autocast_cache
            arguments = (autocast.device, autocast.fast_dtype, autocast._enabled, caches)
            autocast._partbook_node = recorder.effect(torch.amp._enter_autocast, arguments)
            recorder.conditions.devices = True
        return enter(autocast)

    def left(autocast: Any, *error: Any) -> Any:
        if session.recorder is not None and error[0] is None and hasattr(autocast, "_partbook_node"):
            session.recorder.effect(torch.amp._exit_autocast, (autocast._partbook_node,))
        return leave(autocast, *error)

    patches.set(torch.autocast, "__enter__", entered)
    patches.set(torch.autocast, "__exit__", left)


class _Done:
    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _collectives(patches: _Patches) -> None:
    """In-place collectives in leaves and hooks change no metadata: on fake tensors they do nothing."""
    if not dist.is_available():
        return
    for name in _COLLECTIVES:
        for owner in (dist, dist.distributed_c10d):
            if hasattr(owner, name):
                patches.set(owner, name, functools.partial(_collective, getattr(owner, name)))


def _collective(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, FakeTensor) for leaf in leaves) or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return _Done()
    return function(*args, **kwargs)


def _leaf_function(session: Session, patches: _Patches, function: Callable[..., Any]) -> None:
    @functools.wraps(function)
    def leaf(*args: Any, **kwargs: Any) -> Any:
        return session.leaf_function(function, args, kwargs)

    _everywhere(patches, function, leaf)


def _transformers(session: Session, patches: _Patches) -> None:
    """transformers looks at the values of position ids for packed sequences, and assumes some where it cannot.

    Position ids that the model makes itself from a range are not packed; that part of the graph is computed to see.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None:
        # What a run around this one collects must not get fake tensors.
        token = capturing._active_collector.set(None)
        patches.on_undo(functools.partial(capturing._active_collector.reset, token))
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return
    original = masks.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Any:
        recorder = session.recorder
        if recorder is None or not isinstance(position_ids, FakeTensor):
            return None if recorder is None else original(position_ids)
        with session.busy():
            consecutive = ask(recorder.values.tensor(position_ids), session.hint, _are_consecutive)
        return None if consecutive else original(position_ids)

    patches.set(masks, "find_packed_sequence_indices", find_packed_sequence_indices)


def _are_consecutive(position_ids: Tensor) -> bool:
    return bool((torch.diff(position_ids, dim=-1) == 1).all())
