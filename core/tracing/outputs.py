"""What a leaf returns for symbolic inputs: shapes, dtypes, aliases; found by running it, and its effects on the inputs.

A leaf is run on fake tensors of plain sizes (its own Python sees plain ints, and it takes a tenth of the time that
symbols take), at three assignments of sizes; each output size is then fitted to those of the inputs. Where that does
not serve, in this order: symbolic fakes, and a real copy of the leaf on random data (control flow on values, as in the
routing of experts).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TraceError
from ..execution import without_caches
from .kind import CONSTANTS
from .library import appearance
from .snapshot import Read, Snapshot
from .symbols import SIZES, expression

if TYPE_CHECKING:
    from .session import Session

VALUE_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
# Multiples of what a forward may want a size to divide by, such as the ranks that share a sequence.
_STEPS = (24, 48, 72, 96, 120, 144), (72, 24, 144, 48, 96, 120)


class _NoFit(Exception):
    """The outputs are no simple function of the sizes of the inputs."""


@dataclass(frozen=True)
class Made:
    """A new tensor: its sizes, its dims from outermost in memory to innermost, and the input that it is a view of."""

    sizes: tuple[Any, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    view_of: int | None


@dataclass(frozen=True)
class Passed:
    """The leaf's input at this place, itself."""

    place: int


@dataclass(frozen=True)
class Size:
    value: Any


@dataclass(frozen=True)
class Outputs:
    """The outputs of a leaf for one kind of inputs; ``items`` are what its flattened result holds."""

    spec: pytree.TreeSpec
    items: tuple[Any, ...]
    mutated: frozenset[int]
    random: bool


@dataclass(frozen=True)
class _Known:
    """The outputs of one leaf, and what it read: another that looks the same and agrees in it has the same."""

    outputs: Outputs | None
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class _Run:
    output: Any
    tensors: dict[int, Tensor]
    mutated: frozenset[int]
    random: bool


class Leaves:
    """Runs leaves for a session and remembers their outputs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plain = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, list[_Known]] = {}
        self._appearances: dict[int, Any] = {}
        # the leaf that is being described: the paths of its modules, and what was read of them
        self._paths: dict[int, str] = {}
        self._reads: dict[tuple[str, str], Read] = {}

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Outputs | None]:
        """The output for symbolic inputs, and its description; None for that where the leaf ran on the symbols."""
        # A cache that a run fills would be another one for the next run; it changes no shape.
        args, kwargs = without_caches(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        look = self._appearance(module)
        key = (look, module.training, torch.is_grad_enabled(), spec, tuple(map(_key, leaves)))
        alike = self._known.setdefault(key, [])
        known = next((known for known in alike if all(read.holds(module) for read in known.reads)), None)
        if known is None:
            known = self._collected(module, lambda: self._describe(module, forward, leaves, spec))
            alike.append(known)
        self._session.leaf_has_read(module, known.reads)
        if known.outputs is not None:
            return self._make(known.outputs, leaves), known.outputs
        try:
            return forward(*args, **kwargs), None
        except TraceError:
            raise
        except Exception as error:
            why = error
        alike.remove(known)
        alike.append(self._collected(module, lambda: self._of_copy(module, leaves, spec, why)))
        outputs = alike[-1].outputs
        assert outputs is not None
        return self._make(outputs, leaves), outputs

    def forget(self) -> None:
        self._known.clear()
        self._appearances.clear()

    def note(self, module: nn.Module, name: str, value: Any, of_class: bool) -> None:
        """Some Python has read an attribute of a module: perhaps of the leaf that is being described."""
        path = self._paths.get(id(module))
        if path is not None and (path, name) not in self._reads:
            self._reads[path, name] = Read(path, name, Snapshot.of(value), of_class)

    def _collected(self, module: nn.Module, describe: Callable[[], Outputs | None]) -> _Known:
        self._paths = {id(below): path for path, below in module.named_modules()}
        self._reads = {}
        try:
            return _Known(describe(), tuple(self._reads.values()))
        finally:
            self._paths = {}

    def _appearance(self, module: nn.Module) -> Any:
        if id(module) not in self._appearances:
            self._appearances[id(module)] = appearance(module)
        return self._appearances[id(module)]

    def run_function(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a function that stays whole."""
        try:
            return function(*args, **kwargs)
        except VALUE_DEPENDENT as error:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            name = getattr(function, "__name__", repr(function))
            outputs = self._on_real_data(f"the function {name!r}", lambda: function, leaves, spec, error)
            # whether it draws random numbers is not known
            self._session.spy.random = True
            return self._make(outputs, leaves)

    def _describe(self, module: nn.Module, forward: Callable[..., Any], leaves: Any, spec: Any) -> Outputs | None:
        if not all(isinstance(value, (Tensor, *SIZES, *CONSTANTS)) for value in leaves):
            # a Python object (a cache) that a second run would change again
            return None
        sizes = self._assignments(leaves)
        try:
            return self._fit(
                [self._once(forward, leaves, spec, values, self._plain) for values in sizes], sizes, leaves
            )
        except VALUE_DEPENDENT as error:
            return self._of_copy(module, leaves, spec, error)
        except TraceError:
            raise
        except Exception:
            # such as a size that must divide by another: on symbols the leaf gets the sizes that it is called with
            return None

    def _of_copy(self, module: nn.Module, leaves: Any, spec: Any, why: Exception) -> Outputs:
        name = f"the leaf {self._session.describe(module)}"
        if any(parameter.is_meta for parameter in module.parameters()):
            raise _error(name, why, "its parameters are on the meta device") from why
        return self._on_real_data(name, lambda: _copied_forward(module), leaves, spec, why)

    def _on_real_data(
        self, name: str, make: Callable[[], Callable[..., Any]], leaves: Any, spec: Any, why: Exception
    ) -> Outputs:
        sizes, runs = self._assignments(leaves), []
        with torch.random.fork_rng(devices=[]):
            for values in sizes:
                try:
                    runs.append(self._once(make(), leaves, spec, values, None))
                except Exception as error:
                    also = f"running it on random data fails too ({type(error).__name__}: {error})"
                    raise _error(name, why, also) from why
        try:
            return self._fit(runs, sizes, leaves)
        except _NoFit as error:
            raise _error(name, why, str(error)) from why

    def _assignments(self, leaves: list[Any]) -> list[dict[Any, Any]]:
        """The sizes at hand and two others near them, all different."""
        symbols = {symbol for value in leaves for size in _sizes(value) for symbol in size.free_symbols}
        ordered = sorted(symbols, key=str)
        hints = [int(self._session.hint(symbol)) for symbol in ordered]
        found = [dict(zip(ordered, map(sympy.Integer, hints), strict=True))]
        for steps in _STEPS:
            values = [hint + steps[i % len(steps)] for i, hint in enumerate(hints)]
            while len(set(values)) < len(values):
                values = [value + i for i, value in enumerate(values)]
            found.append(dict(zip(ordered, map(sympy.Integer, values), strict=True)))
        return found

    def _once(self, forward: Callable[..., Any], leaves: Any, spec: Any, sizes: Any, mode: Any) -> _Run:
        """One run at plain sizes: on fake tensors of ``mode``, or on random data without one."""
        made: dict[int, Tensor] = {}
        context: AbstractContextManager[Any] = mode if mode is not None else _disable_current_modes()
        with self._session.spy.separately() as spy, context:
            inputs = [_concrete(value, sizes, made, real=mode is None) for value in leaves]
            args, kwargs = pytree.tree_unflatten(inputs, spec)
            versions = {place: tensor._version for place, tensor in made.items()}
            output = forward(*args, **kwargs)
            random = spy.random
        changed = frozenset(place for place, tensor in made.items() if tensor._version != versions[place])
        return _Run(output, made, changed, random or mode is None)

    def _fit(self, runs: list[_Run], sizes: list[dict[Any, Any]], leaves: list[Any]) -> Outputs:
        flat = [pytree.tree_flatten(run.output) for run in runs]
        if any(spec != flat[0][1] for _, spec in flat):
            raise _NoFit("the structure of its output depends on sizes")
        places: dict[int, int] = {}
        for place, value in enumerate(leaves):
            if isinstance(value, Tensor):
                places.setdefault(id(value), place)
        fitter = _Fitter(sizes, leaves)
        items = [_item(values, runs[0].tensors, places, fitter) for values in zip(*[f[0] for f in flat], strict=True)]
        mutated = frozenset(places[i] for run in runs for i in run.mutated)
        return Outputs(flat[0][1], tuple(items), mutated, any(run.random for run in runs))

    def _make(self, outputs: Outputs, leaves: list[Any]) -> Any:
        made: list[Any] = []
        for item in outputs.items:
            if isinstance(item, Passed):
                made.append(leaves[item.place])
            elif isinstance(item, Size):
                made.append(self._session.symbolic(item.value))
            elif isinstance(item, Made):
                made.append(self._new(item))
                if item.view_of is not None:
                    made[-1]._partbook_view_of = leaves[item.view_of]
            else:
                made.append(item)
        return pytree.tree_unflatten(made, outputs.spec)

    def _new(self, item: Made) -> Tensor:
        sizes = [self._session.symbolic(size) for size in item.sizes]
        tensor = torch.empty([sizes[dim] for dim in item.order], dtype=item.dtype, device=item.device)
        if item.requires_grad:
            # no leaf of autograd: the forward may write to it
            tensor = tensor.requires_grad_().clone()
        return tensor.permute([item.order.index(dim) for dim in range(len(item.order))])


def _copied_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a copy, without hooks: what a real run changes is thrown away."""
    with _disable_current_modes():
        clone = copy.deepcopy(module)
    clone.__dict__.pop("forward", None)
    for below in clone.modules():
        below._forward_hooks.clear()
        below._forward_pre_hooks.clear()
    return clone.forward


def _error(name: str, error: Exception, why: str) -> TraceError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return TraceError(
        f"the outputs of {name} cannot be found: it does not run on fake tensors ({type(error).__name__}: {first}) "
        f"and {why}"
    )


class _Fitter:
    """Finds the expression in the input sizes that gives an output size at every assignment."""

    def __init__(self, sizes: list[dict[Any, Any]], leaves: list[Any]) -> None:
        self.sizes = sizes
        known = {size for value in leaves for size in _sizes(value) if not size.is_number}
        ordered = sorted(known, key=lambda e: (e.count_ops(), str(e)))
        self._candidates = [*ordered, *(a * b for i, a in enumerate(ordered) for b in ordered[i:])]

    def __call__(self, values: list[int]) -> Any:
        if len(set(values)) == 1:
            return sympy.Integer(values[0])
        fits = [c for c in self._candidates if self._at(c) == values] or list(self._scaled(values))
        if not fits:
            raise _NoFit(f"an output size ({values}) is no simple function of the sizes of its inputs")
        return fits[0]

    def _at(self, candidate: Any) -> list[int]:
        return [int(candidate.xreplace(assignment)) for assignment in self.sizes]

    def _scaled(self, values: list[int]) -> Iterator[Any]:
        for candidate in self._candidates:
            at = self._at(candidate)
            pairs = list(zip(values, at, strict=True))
            if all(value % x == 0 for value, x in pairs) and len({value // x for value, x in pairs}) == 1:
                yield candidate * (values[0] // at[0])
            if len({value - x for value, x in pairs}) == 1:
                yield candidate + (values[0] - at[0])


def _item(values: tuple[Any, ...], inputs: dict[int, Tensor], places: dict[int, int], fitter: _Fitter) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        if isinstance(first, int) and not isinstance(first, bool) and any(value != first for value in values):
            return Size(fitter(list(values)))
        if any(type(value) is not type(first) or (value is not first and value != first) for value in values):
            raise _NoFit(f"it returns Python values that depend on sizes: {values}")
        return first
    itself = next((place for place, tensor in inputs.items() if tensor is first), None)
    if itself is not None:
        return Passed(places[itself])
    if any(value.dim() != first.dim() for value in values):
        raise _NoFit("the number of dims of its output depends on sizes")
    sizes = tuple(fitter([value.shape[dim] for value in values]) for dim in range(first.dim()))
    order = tuple(sorted(range(first.dim()), key=lambda dim: (-first.stride()[dim], dim)))
    memory = storage(first)
    view_of = next((places[place] for place, tensor in inputs.items() if storage(tensor) == memory), None)
    return Made(sizes, order, first.dtype, first.device, first.requires_grad, view_of)


def storage(tensor: Tensor) -> int:
    """A key of the memory that a tensor uses, as far as known: a view made by a leaf has that of its input."""
    base = getattr(tensor, "_partbook_view_of", tensor)
    return base.untyped_storage()._cdata


def _concrete(value: Any, sizes: dict[Any, Any], made: dict[int, Tensor], real: bool) -> Any:
    """The value at plain sizes."""

    def at(size: Any) -> int:
        return int(expression(size).xreplace(sizes))

    if isinstance(value, SIZES):
        return at(value)
    if not isinstance(value, Tensor):
        return value
    if id(value) not in made:
        order = sorted(range(value.dim()), key=lambda dim: (-at(value.stride()[dim]), dim))
        tensor = torch.empty([at(value.shape[dim]) for dim in order], dtype=value.dtype, device=value.device)
        if real:
            tensor = tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
        if value.requires_grad:
            # no leaf of autograd: the forward may write to it
            tensor = tensor.requires_grad_().clone()
        made[id(value)] = tensor.permute([order.index(dim) for dim in range(len(order))])
    return made[id(value)]


def _sizes(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [expression(size) for size in value.shape]
    return [expression(value)] if isinstance(value, SIZES) else []


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = tuple(str(expression(size)) for size in value.shape)
        strides = tuple(str(expression(stride)) for stride in value.stride())
        return sizes, strides, value.dtype, value.device, value.requires_grad
    if isinstance(value, SIZES):
        return str(value.node.expr)
    return type(value), value if isinstance(value, int | float | str | bool | None) else id(value)
