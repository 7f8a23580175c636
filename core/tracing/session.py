"""One run of a model on fake tensors with symbolic sizes, in which the forward of one of its modules is recorded."""

from __future__ import annotations

import functools
import logging
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils import _pytree as pytree

from ..collectives import pretended
from ..errors import TraceError
from ..execution import own_forward, plan_of, without_caches
from .isolation import Untouched
from .kind import arranger_of
from .modes import Calls, Mark, Shapes, Spy
from .outputs import Leaves, Outputs
from .patches import patched
from .recorder import Recorder, Recording
from .snapshot import Read, Snapshot

_MACHINERY = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
call_module = nn.Module.__call__
# whether there is a graph for a call already: (module, its arguments by name) -> bool
Known = Callable[[nn.Module, dict[str, Any]], bool]


class _Recorded(BaseException):
    """The module is recorded: the rest of the model need not run."""


class Session:
    """Records the forward of ``target``, a module of ``root``; ``leaves`` are functions that stay one node each.

    ``dissolved`` are paths below the target whose own forwards are recorded in the place of their calls; ``marked`` are
    paths below it after whose calls the graph gets a mark.
    """

    def __init__(
        self,
        root: nn.Module,
        path: str,
        leaves: Sequence[Callable[..., Any]] = (),
        dissolved: Collection[str] = (),
        marked: Collection[str] = (),
    ) -> None:
        self.root, self.path = root, path
        self.target = root.get_submodule(path)
        self.leaf_functions = tuple(leaves)
        self.dissolved, self.marked = frozenset(dissolved), frozenset(marked)
        self.shapes = Shapes()
        self.shapes.session = self
        self.fake = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.spy = Spy()
        self.untouched = Untouched(root)
        self._leaves = Leaves(self)
        self._thread = threading.get_ident()
        self._stack: list[Recorder | None] = []
        self._depth = 0
        self._paths: dict[int, str] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), name)
        # what contains the target runs as it is
        names = path.split(".") if path else []
        self._open = {id(root.get_submodule(".".join(names[:i]))) for i in range(len(names) + 1)}
        self.within: list[str] = []
        self._recordings: list[Recording] = []
        self._recorders: list[Recorder] = []
        self._is_reached = False

    # ------------------------------------------------------------------ state

    @property
    def recorder(self) -> Recorder | None:
        return self._stack[-1] if self._stack else None

    @property
    def is_busy(self) -> bool:
        """Inside a torch call, or the machinery: what happens now is not the module's own Python."""
        return self._depth > 0

    @property
    def is_other_thread(self) -> bool:
        return threading.get_ident() != self._thread

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def outside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.busy():
            return function(*args, **kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside a leaf: nothing is recorded."""
        self._stack.append(None)
        try:
            yield
        finally:
            self._stack.pop()

    def describe(self, module: nn.Module) -> str:
        path = self._paths.get(id(module))
        return f"{type(module).__name__} {path!r}" if path else f"the model ({type(module).__name__})"

    def hint(self, symbol: Any) -> int:
        return int(self.shapes.guarding_hint_or_throw(symbol))

    def symbolic(self, size: Any) -> Any:
        size = self.shapes.replace(size)
        return int(size) if size.is_number else self.shapes.create_symintnode(size, hint=self.hint(size))

    # ------------------------------------------------------------------ the run

    def record(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_known: Known | None = None
    ) -> list[Recording]:
        """Run the root until the target is called; record the target with its training flag on and off.

        One recording serves for both where the forward does not read the flag, and none is made of a call that
        ``is_known``. Raises TraceError; the model is as it was in any case.
        """
        with self._on_fakes(args, kwargs) as (fake_args, fake_kwargs):
            instead = functools.partial(self._record_target, (True, False), is_known)
            with own_forward(self.target, instead), suppress(_Recorded):
                try:
                    call_module(self.root, *fake_args, **fake_kwargs)
                except TraceError:
                    raise
                except Exception as error:
                    raise self._failed(self.target, error) from error
        if not self._is_reached:
            raise TraceError(
                f"{self.describe(self.target)} is not traced: the model does not call it with these inputs"
            )
        return self._recordings

    def record_call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recording:
        """Record one call of the target, whose own ``forward`` this is. Raises TraceError."""
        with self._on_fakes(args, kwargs) as (fake_args, fake_kwargs), suppress(_Recorded):
            self._record_target((self.target.training,), None, self.target, forward, *fake_args, **fake_kwargs)
        return self._recordings[0]

    @contextmanager
    def _on_fakes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """The world in which forwards are recorded, and the arguments as fake tensors."""
        with ExitStack() as stack:
            stack.enter_context(self.untouched)
            # Nothing is saved for a backward that will not be, nor counted by a recomputation around.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            stack.enter_context(patched(self))
            stack.enter_context(pretended())
            stack.enter_context(_quiet_log())
            fakes = self._as_fakes((args, dict(kwargs)))
            # The Python dispatcher: composite kernels in C++ would fix symbolic sizes.
            for mode in (self.fake, enable_python_dispatcher(), self.spy, Calls(self)):
                stack.enter_context(mode)
            try:
                yield fakes
            finally:
                self._forget()

    def _forget(self) -> None:
        """Let go of the values of the run: their history holds the parameters as they are now, before a shard."""
        for recorder in self._recorders:
            recorder.values.forget()
        self._recorders.clear()
        self._leaves.forget()

    def _as_fakes(self, tree: Any) -> Any:
        known: dict[int, Tensor] = {}

        def fake(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in known:
                known[id(value)] = self._fake(value, "in" + "".join(c if c.isalnum() else "_" for c in str(path)))
            return known[id(value)]

        return pytree.tree_map_with_path(fake, tree)

    def _fake(self, value: Tensor, name: str) -> Tensor:
        """A fake tensor of symbolic sizes, laid out in memory as ``value`` is."""
        sizes = [
            self.shapes.create_symintnode(
                self.shapes.create_symbol(size, ConstantSource(f"{name}_{dim}"), DimDynamic.DUCK), hint=size
            )
            for dim, size in enumerate(value.shape)
        ]
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride()[dim], dim))
        with self.fake:
            made = torch.empty([sizes[dim] for dim in order], dtype=value.dtype, device=value.device)
            made = made.permute([order.index(dim) for dim in range(len(order))]) if value.dim() > 1 else made
            if not value.requires_grad:
                return made
            return made.requires_grad_() if value.is_leaf else made.requires_grad_().clone()

    def _record_target(
        self,
        modes: Sequence[bool],
        is_known: Known | None,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        arranger = arranger_of(module)
        args, kwargs = arranger.using_none(*without_caches(args, kwargs))
        given = arranger(args, kwargs)
        if given is None:
            return forward(*args, **kwargs)
        self._is_reached = True
        for training in modes:
            with training_set(module, training):
                if is_known is not None and is_known(module, given):
                    continue
                recording = self._record(module, given, functools.partial(forward, *args, **kwargs))
            self._recordings.append(recording)
            if not any(read.name == "training" for read in recording.conditions.reads):
                break
        raise _Recorded

    def _record(self, module: nn.Module, given: dict[str, Any], forward: Callable[[], Any]) -> Recording:
        recorder = Recorder(self, module)
        self._recorders.append(recorder)
        self._leaf_reads: dict[tuple[str, str], Read] = {}
        with self.busy():
            arguments = recorder.inputs(given)
        self._stack.append(recorder)
        try:
            result = forward()
        except TraceError:
            raise
        except Exception as error:
            raise self._failed(module, error) from error
        finally:
            self._stack.pop()
        with self.busy():
            spec = recorder.output(result)
        return Recording(recorder.graph, arguments, spec, recorder.conditions, tuple(self._leaf_reads.values()))

    def _failed(self, module: nn.Module, error: Exception) -> TraceError:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
        frame = own[-1] if own else frames[-1]
        whose = "its forward" if self._is_reached else "the model, before it is called,"
        first = (str(error).strip() or "no message").split("\n\n")[0]
        return TraceError(
            f"{self.describe(module)} cannot be traced: {whose} fails: {type(error).__name__}: {first}"
            f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        )

    def _inside(self, module: nn.Module) -> str | None:
        """The path of a module below the one that is being recorded; None outside, or while nothing is recorded."""
        if not self._stack or self._stack[0] is None or self.is_other_thread:
            return None
        return self._stack[0].paths.get(id(module))

    def attribute_written(self, module: nn.Module, name: str) -> None:
        """Some Python assigns to an attribute of a module, or deletes it."""
        if self.recorder is not None and not self.is_busy and self._inside(module) is not None:
            raise self.recorder.refusal(f"it assigns to the attribute {name!r}, which a graph cannot repeat")

    def attribute_read(self, module: nn.Module, name: str, value: Any) -> None:
        """Some Python read a plain attribute of a module."""
        if isinstance(value, nn.Module | Tensor):
            return
        of_class = name not in module.__dict__
        self._leaves.note(module, name, value, of_class)
        path = self._inside(module)
        if path is None:
            return
        if self.recorder is not None and not self.is_busy:
            self.recorder.read(path, name, value, of_class)
        elif (path, name) not in self._leaf_reads:
            self._leaf_reads[path, name] = Read(path, name, Snapshot.of(value), of_class)

    def leaf_has_read(self, leaf: nn.Module, reads: Sequence[Read]) -> None:
        """What the outputs of a leaf depend on, which another leaf that looks the same has read before."""
        above = self._inside(leaf)
        if above is not None:
            for read in reads:
                path = f"{above}.{read.path}".strip(".")
                self._leaf_reads.setdefault((path, read.name), replace(read, path=path))

    # ------------------------------------------------------------------ modules that are called

    def module_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands for ``nn.Module.__call__`` during the run."""
        if self.is_busy or self.is_other_thread:
            return call_module(module, *args, **kwargs)
        recorder = self.recorder
        if recorder is None:
            return self.run_leaf(module, args, kwargs)[0]
        path = recorder.paths.get(id(module))
        plan = plan_of(module)
        if path and plan is not None and plan.decomposed:
            return recorder.call_product(module, path, *args, **kwargs)
        if path:
            return self._child_called(recorder, module, path, args, kwargs)
        if path is None and any(True for _ in module.parameters()):
            raise recorder.refusal(f"it calls a {type(module).__name__} that is none of its submodules")
        return call_module(module, *args, **kwargs)

    def _child_called(self, recorder: Recorder, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        if path in self.dissolved:
            recorder.note_containers(path)
            # not taken off where it fails: there it says in which module
            self.within.append(path)
            result = call_module(module, *args, **kwargs)
            self.within.pop()
        else:
            result = recorder.call_module(module, path, args, kwargs)
        if path in self.marked:
            recorder.effect(Mark(path), ())
        return result

    def run_leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outputs | None]:
        """A module whose inside is not recorded: its hooks run as they are, its forward is asked for its outputs."""
        is_one_call = type(module).__module__.startswith("torch.nn.modules") and not module._modules
        if id(module) in self._open or is_one_call:
            return call_module(module, *args, **kwargs), None
        found: list[Outputs | None] = [None]
        own, forward = module.__dict__.get("forward"), module.forward

        def outputs(*args: Any, **kwargs: Any) -> Any:
            with self.busy():
                result, found[0] = self._leaves.run(module, forward, args, kwargs)
            return result

        module.__dict__["forward"] = outputs
        try:
            return call_module(module, *args, **kwargs), found[0]
        finally:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own

    def leaf_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that stays one node: like a leaf, it may ask for values."""
        if self.recorder is None or self.is_busy:
            return function(*args, **kwargs)
        return self.recorder.call(function, args, kwargs, functools.partial(self._leaves.run_function, function))


def _nothing(x: Any) -> Any:
    return None


@contextmanager
def training_set(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(below, below.training) for below in module.modules()]
    for below, _ in before:
        below.__dict__["training"] = training
    try:
        yield
    finally:
        for below, flag in before:
            below.__dict__["training"] = flag


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Fake tensors log a traceback for every exception; the ones here are handled."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
