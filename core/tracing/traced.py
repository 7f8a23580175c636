"""A module that runs on graphs: one for each kind of call, recorded when that kind is first seen."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..collectives import is_tracing
from ..errors import GuardError, Problem, TraceError
from ..execution import has_cache, has_hooks, has_past, without_caches
from .code import compile_graph
from .examples import tensors_of
from .isolation import ModesKept
from .kind import Accept, Arranger, arranger_of, make_accept
from .library import Library
from .recorder import Recording
from .region import Region
from .session import Session, training_set
from .snapshot import PLAIN, Read

# A forward that is called in ever new ways (a Python loop over the length) gains nothing from graphs.
_MOST_KINDS = 32


class RewriteError(Exception):
    """A rewrite that a graph does not take."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Rewrite(Protocol):
    """One change of a graph, in place; it is repeated on every graph that the module gets."""

    def __call__(self, graph: fx.Graph, module: nn.Module) -> Sequence[str]:
        """The paths of the modules whose training flags it relied on. Raises RewriteError, leaving a graph that is not
        to be used."""

    def __str__(self) -> str:
        """The call that asked for it."""

    @property
    def summary(self) -> str:
        """What the graph has now, in few words."""


@dataclass
class Kind:
    """One kind of call and its graph; the code is made when it first runs."""

    graph: fx.Graph
    takes: Accept
    output: pytree.TreeSpec
    label: str
    # None: it serves for training and evaluation
    training: bool | None = None
    reads: tuple[Read, ...] = ()
    # the example inputs with which it was recorded before the module was first called
    inputs: Any = None
    # children that it does the work of, or whose training flag it relies on
    relies_on: tuple[Relied, ...] = ()
    _run: Callable[..., Any] | None = None
    _modes: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @staticmethod
    def of(recording: Recording, session: Session, module: nn.Module) -> Kind:
        label, defaults = session.describe(module), arranger_of(module).defaults
        try:
            accept = make_accept(
                label, recording.arguments, defaults, recording.graph, recording.conditions, session.shapes.replace
            )
        except LookupError as error:
            raise TraceError(f"{label} cannot be traced: {error.args[0]}") from None
        own = [read for read in recording.conditions.reads if read.name != "training"]
        modes = [
            read.value.content for read in recording.conditions.reads if (read.path, read.name) == ("", "training")
        ]
        training = modes[0] if modes else None
        return Kind(recording.graph, accept, recording.output, label, training, (*own, *recording.leaf_reads))

    def accept(self, module: nn.Module, given: dict[str, Any]) -> tuple[Any, ...] | str:
        """The values of the graph's placeholders, or the reason why it is not good for the call."""
        for relied in self.relies_on:
            reason = relied.differs(module)
            if reason:
                return reason
        return self.takes(module, given)

    def holds_for(self, module: nn.Module) -> bool:
        """Whether another module that looks like the recorded one also agrees in what was read of it."""
        return all(read.name == "training" or read.holds(module) for read in self.reads)

    def __call__(self, module: nn.Module, values: tuple[Any, ...]) -> Any:
        self.compile()
        assert self._run is not None
        with self._modes:
            leaves = self._run(module, *values)
        if self.output.is_leaf():
            return leaves[0]
        return pytree.tree_unflatten(leaves, self.output)

    def compile(self) -> None:
        """Make the code of the graph, if that has not been done."""
        if self._run is None:
            self._run = compile_graph(self.graph, self.label)
            if any(node.meta.get("effect") for node in self.graph.nodes):
                self._modes = ModesKept()

    def rewritten(self, rewrite: Rewrite, module: nn.Module) -> Kind:
        """The same kind of call with its graph rewritten. Raises RewriteError."""
        graph = copy_of(self.graph)
        relied = [*rewrite(graph, module)]
        graph.lint()
        for node in graph.nodes:
            if isinstance(node.target, Region):
                relied += node.target.inlined
        known = {each.path for each in self.relies_on}
        new = (Relied.of(path, module) for path in dict.fromkeys(relied) if path not in known)
        return dataclasses.replace(self, graph=graph, relies_on=(*self.relies_on, *new), _run=None)


@dataclass(frozen=True)
class Relied:
    """A child that a graph does the work of: with these settings, and without hooks."""

    path: str
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(path: str, module: nn.Module) -> Relied:
        attributes = vars(module.get_submodule(path)).items()
        return Relied(path, tuple((name, value) for name, value in attributes if isinstance(value, (*PLAIN, tuple))))

    @property
    def training(self) -> bool:
        return dict(self.settings)["training"]

    def differs(self, module: nn.Module) -> str:
        """Why the graph is not good for the module as it is now, "" where it is."""
        try:
            child = module.get_submodule(self.path)
        except AttributeError:
            # a rewrite has taken it out
            return ""
        for name, value in self.settings:
            if child.__dict__.get(name) != value:
                return f"{self.path}.{name} was {value}, now it is {child.__dict__.get(name)}"
        return f"{self.path!r} had no hooks" if has_hooks(child) else ""


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A graph of its own with the same nodes, names and metadata."""
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, values)
    new.output(output)
    for old, made in values.items():
        assert old.name == made.name, (old, made)
    return new


@dataclass
class Traced:
    """The graphs of one module; ``rewrites`` were applied to each of them in their order.

    ``inputs`` are the example inputs of the whole model with which it is traced before it is first called.
    ``stand_ins`` are modules that rewrites have taken out of the module: its own forward calls them, so they are put
    back while it is recorded.
    """

    path: str
    arranger: Arranger
    library: Library
    inputs: tuple[Mapping[str, Any], ...]
    leaves: tuple[Callable[..., Any], ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    stand_ins: dict[str, nn.Module] = field(default_factory=dict)
    # children that are there, but not called any more, and what is called in their place
    bypassed: dict[str, str] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    _last: Kind | None = field(default=None, init=False)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            # Another module is being traced, of which this one is a leaf.
            with present(module, self.stand_ins):
                return forward(*args, **kwargs)
        arranger = self.arranger
        if has_cache(args, kwargs) or arranger.asks_for_cache(kwargs):
            is_training = module.training and torch.is_grad_enabled()
            if is_training and not has_past(module, args, kwargs):
                args, kwargs = without_caches(args, kwargs)
            elif not self.stand_ins:
                # Nothing was taken out of it: its own forward does the same, and writes the cache.
                return forward(*args, **kwargs)
            else:
                raise GuardError(
                    f"{self.path or 'the model'}: parts of it were replaced in its graph, which cannot write a "
                    "key-value cache\n  hint: use_cache=False"
                )
        args, kwargs = arranger.using_none(args, kwargs)
        given = arranger(args, kwargs)
        if given is None:
            return forward(*args, **kwargs)
        # The next call is likely to be of the same kind.
        for kind in (self._last, *self.kinds) if self._last else self.kinds:
            values = kind.accept(module, given)
            if type(values) is tuple:
                self._last = kind
                return kind(module, values)
        return self._new_kind(module, forward, args, kwargs, given)

    def _new_kind(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, given: Any) -> Any:
        if len(self.kinds) >= _MOST_KINDS:
            raise GuardError(self._explain(module, given, f"it has {_MOST_KINDS} graphs already"))
        try:
            with present(module, self.stand_ins):
                kind = self.rewritten(self._recorded(module, forward, args, kwargs, given), module)
        except (TraceError, RewriteError) as error:
            raise GuardError(self._explain(module, given, str(error))) from error
        values = kind.accept(module, given)
        if type(values) is not tuple:
            raise GuardError(self._explain(module, given, f"a graph made for this call does not take it: {values}"))
        self.kinds.append(kind)
        return kind(module, values)

    def _recorded(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, given: Any) -> Kind:
        for kind in self.library.find(module, self.leaves):
            if type(kind.accept(module, given)) is tuple:
                return kind
        session = Session(module, "", self.leaves)
        kind = Kind.of(session.record_call(forward, args, kwargs), session, module)
        self.library.add(module, self.leaves, [kind])
        return kind

    def traced(self, model: nn.Module) -> Traced:
        """With graphs for the example inputs, as the module is now. Raises TraceError or RewriteError."""
        module = model.get_submodule(self.path)
        with present(module, self.stand_ins):
            kinds = [kind for kind in self.library.find(module, self.leaves) if kind.inputs == self.inputs]
            if not kinds:
                for inputs in self.inputs:
                    kinds += self._record(model, module, inputs, kinds)
                self.library.add(module, self.leaves, kinds)
            return dataclasses.replace(self, kinds=[new for kind in kinds for new in self._in_modes(kind, module)])

    def with_rewrite(self, rewrite: Rewrite, module: nn.Module) -> Traced:
        """With one more rewrite, on every graph. Raises RewriteError."""
        only = dataclasses.replace(self, rewrites=(rewrite,))
        kinds = [new for kind in self.kinds for new in only._in_modes(kind, module)]
        return dataclasses.replace(self, rewrites=(*self.rewrites, rewrite), kinds=kinds)

    def _in_modes(self, kind: Kind, module: nn.Module) -> Iterator[Kind]:
        """The kind rewritten; twice where what it becomes depends on the training flags of children."""
        known = {relied.training for relied in kind.relies_on}
        modes = {kind.training} if kind.training is not None else known or {True, False}
        for training in sorted(modes, reverse=True):
            with training_set(module, training):
                new = self.rewritten(kind, module)
            yield new
            if not new.relies_on:
                break

    def emptied(self) -> Traced:
        """Without its graphs, which are recorded again by need."""
        return dataclasses.replace(self, kinds=[])

    def _record(self, model: nn.Module, module: nn.Module, inputs: Mapping[str, Any], known: list[Kind]) -> list[Kind]:
        def is_known(_: nn.Module, given: dict[str, Any]) -> bool:
            return any(type(kind.accept(module, given)) is tuple for kind in known)

        session = Session(model, self.path, self.leaves)
        recordings = session.record((), tensors_of(inputs, model), is_known)
        kinds = [Kind.of(recording, session, module) for recording in recordings]
        return [dataclasses.replace(kind, inputs=self.inputs) for kind in kinds]

    def rewritten(self, kind: Kind, module: nn.Module) -> Kind:
        for rewrite in self.rewrites:
            kind = kind.rewritten(rewrite, module)
        return kind

    def _explain(self, module: nn.Module, given: dict[str, Any], why: str) -> str:
        reasons = [f"  graph {i}: {kind.accept(module, given)}" for i, kind in enumerate(self.kinds[:4])]
        path = f"{type(module).__name__} {self.path or '(the model)'!r}"
        return "\n".join([f"no graph of {path} is good for this call, and none can be made: {why}", *reasons])

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        # Graphs hold names, not modules. Stand-ins ask modules of the model, of the copy those of the copy.
        return dataclasses.replace(self, kinds=list(self.kinds), stand_ins=copy.deepcopy(self.stand_ins, memo))


@contextmanager
def present(module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, ``modules`` are children of ``module``, by their paths below it."""
    places = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in modules]
    for (parent, name), child in zip(places, modules.values(), strict=True):
        parent._modules[name] = child
    try:
        yield
    finally:
        for parent, name in places:
            del parent._modules[name]
