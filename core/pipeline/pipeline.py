"""A model that is cut into stages: traced down to its cuts, for each kind of batch that comes."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import GuardError, Problem, TraceError, did_you_mean
from ..execution import original_class, plan_of
from ..state import skeleton_of
from ..tracing.examples import shapes_of, tensors_of
from ..tracing.session import Session, call_module
from ..tracing.traced import Kind
from .split import SplitError, split
from .wiring import Wiring, symbols_of

# A loader whose batches look ever different gains nothing from graphs.
_MOST_KINDS = 32


class Pipeline:
    """The stages of a model between its ``cuts``, for any batch: its *wiring* is made when the first of its kind comes.

    ``only``: the name of the one output that is needed; by default the loss in training, else all of them.

    Every rank that is given batches of the same look comes to the same wirings: they are made on the meta device, of
    the whole model.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[str], only: str | None = None) -> None:
        self.skeleton = skeleton_of(model)
        self._cuts, self._only = tuple(cuts), only
        self._dissolved = dissolved(self.skeleton, cuts)
        self._wirings: list[Wiring] = []
        # what each stage holds, once that is settled
        self.held: tuple[Any, ...] = ()

    @property
    def cuts(self) -> tuple[str, ...]:
        """In the order in which they are reached, once there is a wiring."""
        return self._wirings[0].cuts if self._wirings else self._cuts

    @property
    def num_stages(self) -> int:
        return len(self._cuts) + 1

    @property
    def wirings(self) -> tuple[Wiring, ...]:
        return tuple(self._wirings)

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.skeleton.parameters()), torch.device("meta"))

    def convert(self, dtype: torch.dtype) -> None:
        """Be the pipeline of the model converted to ``dtype``."""
        if any(p.dtype != dtype for p in self.skeleton.parameters() if p.is_floating_point()):
            for parameter in self.skeleton.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            self._wirings.clear()

    def wiring(self, batch: Mapping[str, Any], training: bool) -> Wiring:
        """The wiring for a batch: the arguments of the model's forward by name, of which only the look matters.

        Gradient mode counts as it is. Raises GuardError for a kind of batch that cannot be split.
        """
        looks = tensors_of(shapes_of(batch) or {}, self.skeleton)
        self.skeleton.train(training)
        for wiring in self._wirings:
            if wiring.accepts(self.skeleton, looks):
                return wiring
        if len(self._wirings) >= _MOST_KINDS:
            raise GuardError(
                f"there are wirings for {_MOST_KINDS} kinds of batches already, and none for {_look(batch)}"
            )
        try:
            wiring = self._record(looks, training)
        except SplitError as error:
            raise GuardError(f"a batch of {_look(batch)} cannot be split into stages: {error.problem}") from error
        except TraceError as error:
            raise GuardError(f"a batch of {_look(batch)} cannot be traced: {error}") from error
        for stage, (part, held) in enumerate(zip(wiring.parts, self.held, strict=False)):
            if not held.has_part(part):
                other = next(path for path in (*part.modules, *part.tensors) if not held.has(path))
                raise GuardError(
                    f"a batch of {_look(batch)} uses {other!r} on stage {stage}, which does not hold it\n"
                    "  hint: cut with inputs= that look like the batches"
                )
        self._wirings.append(wiring)
        return wiring

    def _record(self, batch: Mapping[str, Any], training: bool) -> Wiring:
        session, recording = self._recorded(batch)
        kind = Kind.of(recording, session, self.skeleton)
        is_training = training and torch.is_grad_enabled()
        kept = _needed_outputs(kind, self._only or ("loss" if is_training else None))
        cuts, parts = split(kind.graph, self._cuts, session.shapes.replace, kept)
        symbols = symbols_of(kind, session.shapes.replace)
        # The head of a sharded loss asks whether that loss is computed of what it gives.
        plan = plan_of(self.skeleton)
        follows = plan is not None and plan.around is not None and "labels" in batch
        return Wiring(kind, tuple(cuts), tuple(parts), symbols, torch.is_grad_enabled(), follows)

    def _recorded(self, batch: Mapping[str, Any]) -> tuple[Session, Any]:
        while True:
            inside = {*self._dissolved.ancestors, *self._dissolved.helpers}
            session = Session(self.skeleton, "", (), inside, self._cuts)
            # With what its schedule has around its forward, as a sharded loss.
            whole = functools.partial(call_module, self.skeleton)
            try:
                # A tensor that is made without a device is made on the default one, which stands for the model's here.
                with torch.device(self._device):
                    return session, session.record_call(whole, (), batch)
            except TraceError:
                # A helper that only runs whole stays whole: what it gives crosses the boundaries.
                if not session.within or session.within[-1] not in self._dissolved.helpers:
                    raise
                self._dissolved.helpers.discard(session.within[-1])


class Dissolved(typing.NamedTuple):
    """Paths of modules whose forwards are part of the graph: those around cuts, and helpers without parameters."""

    ancestors: set[str]
    helpers: set[str]


def dissolved(model: nn.Module, cuts: Sequence[str]) -> Dissolved:
    names = [cut.split(".") for cut in cuts]
    ancestors = {".".join(parts[:i]) for parts in names for i in range(1, len(parts))}
    helpers = {
        path
        for path, module in model.named_modules()
        if path and path.rpartition(".")[0] in {"", *ancestors} and path not in {*ancestors, *cuts}
        if next(module.parameters(), None) is None and not type(module).__module__.startswith("torch.nn")
    }
    return Dissolved(ancestors, helpers)


def problems_around(model: nn.Module, cuts: Sequence[str]) -> list[Problem]:
    """What schedules of modules around cuts ask for and a stage, which has parts of them, cannot do."""
    found = []
    for path in sorted({"", *dissolved(model, cuts).ancestors}):
        plan, name = plan_of(model.get_submodule(path)), repr(path) if path else "the model"
        if plan is None:
            continue
        if plan.checkpoint:
            found.append(Problem(f"{name} is checkpointed, and a stage ends inside it", "checkpoint modules below it"))
        if plan.random != "default":
            found.append(Problem(f"{name} has a random stream of its own, and a stage ends inside it", "cut after it"))
        if plan.partial_gradients:
            found.append(Problem(f"{name} has parameters of partial gradients, and a stage ends inside it"))
        if getattr(plan.graph, "rewrites", ()):
            found.append(Problem(f"the graph of {name} was rewritten, and a stage ends inside it", "cut after it"))
    return found


@functools.cache
def accepted_names(model_class: type[nn.Module]) -> set[str] | None:
    """The names of the arguments that the forward of a class takes; None where it takes any."""
    parameters = inspect.signature(model_class.forward).parameters.values()
    names = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {"self"}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = _hints(model_class).get(parameter.name)
            [listed] = typing.get_args(hint) or [_of_transformers(model_class)]
            if not typing.is_typeddict(listed):
                return None
            names |= set(listed.__annotations__)
    return names


def _hints(model_class: type[nn.Module]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(model_class.forward)
    except NameError:
        # of what is imported for type checkers only
        return {}


def _of_transformers(model_class: type[nn.Module]) -> Any:
    """What a transformers model may be given beyond the arguments that its forward names."""
    # Looked up, not imported: a plain PyTorch model does not need transformers.
    transformers = sys.modules.get("transformers")
    if transformers is None or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    return sys.modules["transformers.utils.generic"].TransformersKwargs


def refuse_unknown(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry of a batch that the model does not take."""
    model_class: Any = original_class(model)
    known = accepted_names(model_class)
    for name in batch:
        if known is not None and name not in known:
            raise ValueError(
                f"the batch has {name!r}, which {original_class(model).__name__} does not take\n"
                f"  hint: {did_you_mean(name, sorted(known))}; leave it out in the collator"
            )


def _needed_outputs(kind: Kind, wanted: str | None) -> list[bool]:
    """Which outputs the last stage computes: none but the one of this name, where the model gives it."""
    count = kind.output.num_leaves
    tree = pytree.tree_unflatten(list(range(count)), kind.output)
    place = tree.get(wanted) if isinstance(tree, Mapping) else None
    return [place is None or i == place for i in range(count)]


def _look(batch: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {look}" for name, look in (shapes_of(batch) or {}).items())
