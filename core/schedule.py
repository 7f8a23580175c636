"""The schedule: a tree of handles over a model whose verbs transform it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Self, overload

import torch
from torch import fx, nn

from .errors import GuardError, Problem, ScheduleError, TraceError, did_you_mean, user_line
from .execution import plan_of
from .history import History, Step
from .match import Match, find_matches, find_nodes
from .mesh import Mesh
from .patterns import PatternError, matches_glob, nearest_miss
from .pipeline.balance import MEASURES, Measure, choose_cuts
from .pipeline.split import SplitError
from .primitive import Primitive, Site
from .primitives import (
    Annotate,
    Checkpoint,
    CutPipelineStage,
    Decompose,
    ForkRng,
    Fuse,
    Replace,
    ReplaceAll,
    SetAttribute,
    Shard,
    ShardLoss,
    Sync,
    Trace,
)
from .primitives.trace import bypassed, changed, current, graph_of, no_longer_shown
from .state import State
from .tracing.examples import default_inputs, shapes_of
from .tracing.traced import RewriteError

P = ParamSpec("P")

_STEPS = "_partbook_steps"


def _verb(primitive: Callable[P, Primitive]) -> Callable[Concatenate[Schedule, P], Schedule]:
    """The method that applies ``primitive``; it has the primitive's signature and docstring."""

    def method(self: Schedule, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        return self.do(primitive(*args, **kwargs))

    method.__doc__ = primitive.__doc__
    method.__name__ = primitive.verb  # type: ignore[attr-defined]
    method.__wrapped__ = primitive  # type: ignore[attr-defined]
    return method


class Schedule:
    """One node of a schedule: a module of the model, named by its path.

    ``sch["transformer.h.0"]`` is a node below, ``"lm_head" in sch`` asks for one, ``sch.select("transformer.h.*")``
    finds several, iterating gives the children, ``print(sch)`` shows the tree. The verbs change the model at once, so
    it can be run and debugged between any two of them. A refused call raises ScheduleError and changes nothing.
    """

    def __init__(self, state: State, path: str = "") -> None:
        self.state, self.path = state, path

    @property
    def module(self) -> Any:
        """The ``nn.Module`` in its present form."""
        return self.state.model.get_submodule(self.path)

    @property
    def mesh(self) -> Mesh:
        return self.state.mesh

    @property
    def history(self) -> History:
        """Every step applied so far, to any node of this schedule."""
        return self.state.history

    def __getitem__(self, path: str) -> Schedule:
        if path not in self:
            prefix = path
            while prefix and prefix not in self:
                prefix, _, _ = prefix.rpartition(".")
            names = [name for name, _ in Schedule(self.state, self._join(prefix)).module.named_children()]
            wrong = path[len(prefix) :].lstrip(".").split(".")[0]
            hint = f"below {self._join(prefix) or 'the model'!r} {did_you_mean(wrong, names)}"
            problem = Problem(f"there is no module {self._join(path)!r}", hint)
            raise ScheduleError(f"sch[{self._join(path)!r}]", [problem], user_line())
        return Schedule(self.state, self._join(path))

    def __contains__(self, path: str) -> bool:
        try:
            self.state.model.get_submodule(self._join(path))
        except AttributeError:
            return False
        return True

    def __iter__(self) -> Iterator[Schedule]:
        for name, _ in self.module.named_children():
            yield self[name]

    def select(self, glob: str) -> list[Schedule]:
        """The nodes below that ``glob`` matches, in model order: ``*`` is one name, ``**`` any number of them.

        Raises ScheduleError when there are none.
        """
        found = self._matching(glob)
        if not found:
            problem = Problem(f"no module below {self.path or 'the model'!r} matches {glob!r}")
            raise ScheduleError(f"{self._as_code()}.select({glob!r})", [problem], user_line())
        return found

    @overload
    def find(self, what: str | type[nn.Module]) -> list[Schedule]: ...
    @overload
    def find(self, what: Callable[..., Any]) -> list[Match]: ...
    @overload
    def find(self, *, node: Callable[[fx.Node], bool]) -> list[Match]: ...

    def find(self, what: Any = None, *, node: Any = None) -> Any:
        """Modules below by path glob or type; or places in this module's graph: by pattern, or single nodes.

        A pattern is a function over torch operations that is written as the code to find: its arguments match any
        value, the same one wherever they stand. A module and its functional twin match each other, ``module(glob)(x)``
        matches the call of a child by its path, operands of sums and products match in either order. A place of which
        an intermediate value is used elsewhere does not match, and matches do not overlap. A pattern that returns
        several values matches siblings::

            attn.find(lambda x: (module("q_proj")(x), module("k_proj")(x), module("v_proj")(x)))

        A module that is not traced yet is, when something is found. Of its graphs (with a padding mask, without, ...)
        the first that has a match counts; a step at that match is repeated on all that have it. Raises ScheduleError
        for what is no pattern, and where tracing fails.
        """
        if isinstance(what, str):
            return self.select(what) if self._matching(what) else []
        if isinstance(what, type):
            found = [path for path, module in self.module.named_modules() if path and isinstance(module, what)]
            return [self[path] for path in found]
        try:
            for graph in self.graphs():
                if node is not None:
                    found = find_nodes(self.path, graph, node)
                else:
                    found = find_matches(self.path, graph, self.module, what)
                if found:
                    if graph_of(Site(self.state, self.path)) is None:
                        self.trace()
                    return found
        except PatternError as error:
            call = f"{self._as_code()}.find({getattr(what, '__name__', what)})"
            raise ScheduleError(call, [Problem(str(error))], user_line()) from error
        return []

    def match(self, pattern: Callable[..., Any]) -> Match:
        """The one place where the pattern matches. Raises ScheduleError for none, with the nearest miss, or several."""
        found = self.find(pattern)
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} matches: {', '.join(map(str, found))}" if found else "no match"
        hint = "find() gives all of them" if found else nearest_miss(self.graphs()[0], self.module, pattern)
        call = f"{self._as_code()}.match({getattr(pattern, '__name__', pattern)})"
        raise ScheduleError(call, [Problem(what, hint)], user_line())

    def graphs(self) -> list[fx.Graph]:
        """The graphs of this module, one for each kind of call. A module that is not traced stays so."""
        site = Site(self.state, self.path)
        problems = list(Trace().check(site)) if graph_of(site) is None else []
        if problems:
            raise ScheduleError(f"{self._as_code()}.trace()", problems, user_line())
        try:
            traced = Trace().graphs(site) if graph_of(site) is None else current(site)
            return [kind.graph for kind in traced.kinds]
        except (TraceError, RewriteError) as error:
            found = f"its graph cannot be made again after it was changed: {error}"
            raise ScheduleError(f"{self._as_code()}.graphs()", [Problem(found)], user_line()) from error

    def do(self, primitive: Primitive) -> Self:
        """Apply ``primitive`` here; returns this node. Raises ScheduleError, changing nothing, if a rule is broken."""
        site = Site(self.state, self.path)
        problems = list(bypassed(site)) or list(primitive.check(site))
        if problems:
            raise ScheduleError(f"{self._as_code()}.{primitive.as_call()}", problems, user_line())
        primitive.apply(site)
        for path in primitive.touches(site):
            changed(self.state, path)
        no_longer_shown(self.state, self.path)
        # Not every step leaves a plan behind: a model with slices for weights must not pass for an untouched one.
        self.state.model.__dict__[_STEPS] = True
        self.state.history.append(Step(self.path, primitive, user_line()))
        return self

    def cut_pipeline_stages(
        self,
        stages: int | None = None,
        by: Measure = "flops",
        inputs: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Cut the model into ``stages`` (default: the mesh's pp) so that the slowest is as fast as it can be.

        Balanced are the ``by``: "parameters", "flops" (of the forward pass), or "time" (of forward and backward, taken
        on ``device`` with random weights; ranks that measure by themselves may choose differently, so a dialect asks
        one). Cuts are made after modules in lists of modules (blocks). ``inputs``: as for ``cut_pipeline_stage``. In
        the history they are ``cut_pipeline_stage`` steps. Raises ScheduleError, changing nothing.
        """
        stages = self.mesh.pp if stages is None else stages
        call = f"sch.cut_pipeline_stages(stages={stages}, by={by!r})"
        problems = list(self._auto_problems(stages, by, inputs))
        if problems:
            raise ScheduleError(call, problems, user_line())
        examples = shapes_of(inputs) or self.state.example_inputs or default_inputs(self.state.model, self.mesh.tp)[0]
        try:
            cuts = choose_cuts(self.state.model, stages, by, examples, torch.device(device)) if stages > 1 else []
        except (SplitError, GuardError) as error:
            problem = getattr(error, "problem", Problem(str(error)))
            raise ScheduleError(call, [problem], user_line()) from error
        for cut in cuts:
            self[cut].cut_pipeline_stage(inputs=inputs)
        return self

    def _auto_problems(self, stages: int, by: str, inputs: Any) -> Iterator[Problem]:
        if self.path:
            yield Problem("automatic cuts are made in the whole model", "sch.cut_pipeline_stages(...)")
        if self.state.cuts:
            yield Problem(f"it is cut already, after {', '.join(map(repr, self.state.cuts))}")
        if by not in MEASURES:
            yield Problem(f"stages are balanced by one of {', '.join(MEASURES)}, not by {by!r}")
        if by == "time" and self.mesh.tp > 1:
            yield Problem(f"time is measured on one rank alone, which tp={self.mesh.tp} does not allow", 'by="flops"')
        if stages < 1:
            yield Problem(f"stages={stages} is not positive")
        if inputs is None and self.state.example_inputs is None and not default_inputs(self.state.model):
            name = type(self.state.model).__name__
            yield Problem(f"no example inputs are known for a {name}", "inputs={argument of the model: tensor, ...}")

    def is_sharded(self, param: str) -> bool:
        """Whether parameter ``param`` of this module is split, through this or another of its names."""
        parameter = self.module._parameters.get(param)
        return parameter is not None and self.state.canonical(parameter) in self.state.layouts

    shard = _verb(Shard)
    sync = _verb(Sync)
    replace = _verb(Replace)
    replace_all = _verb(ReplaceAll)
    checkpoint = _verb(Checkpoint)
    fork_rng = _verb(ForkRng)
    annotate = _verb(Annotate)
    set_attribute = _verb(SetAttribute)
    shard_loss = _verb(ShardLoss)
    trace = _verb(Trace)
    fuse = _verb(Fuse)
    decompose = _verb(Decompose)
    cut_pipeline_stage = _verb(CutPipelineStage)

    def __str__(self) -> str:
        from .show import tree

        return tree(self)

    def __repr__(self) -> str:
        return f"<Schedule {self.path or '(root)'}: {type(self.module).__name__}>"

    def _matching(self, glob: str) -> list[Schedule]:
        return [self[path] for path, _ in self.module.named_modules() if path and matches_glob(path, glob)]

    def _join(self, path: str) -> str:
        return f"{self.path}.{path}".strip(".")

    def _as_code(self) -> str:
        return f"sch[{self.path!r}]" if self.path else "sch"


def create_schedule(model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """A schedule over ``model`` for ``mesh`` (default: one process), with nothing applied yet.

    The model may be on the meta device. Raises ScheduleError for a model that is scheduled already.
    """
    if _STEPS in model.__dict__ or any(plan_of(module) is not None for module in model.modules()):
        problem = Problem(f"this {type(model).__name__} has been scheduled before", "start from a fresh model")
        raise ScheduleError("create_schedule(model)", [problem], user_line())
    mesh = mesh or Mesh()
    return Schedule(State.of(model, mesh, History(mesh=mesh)))
