"""The schedule: a tree of handles over a model whose verbs transform it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Concatenate, ParamSpec, Self

from torch import nn

from .errors import Problem, ScheduleError, did_you_mean, user_line
from .execution import plan_of
from .history import History, Step
from .mesh import Mesh
from .primitive import Primitive, Site
from .primitives import (
    Annotate,
    Checkpoint,
    ForkRng,
    Replace,
    ReplaceAll,
    SetAttribute,
    Shard,
    ShardLoss,
    Sync,
)
from .state import State

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
        pattern = glob.split(".")
        found = [self[path] for path, _ in self.module.named_modules() if path and _matches(path.split("."), pattern)]
        if not found:
            problem = Problem(f"no module below {self.path or 'the model'!r} matches {glob!r}")
            raise ScheduleError(f"{self._as_code()}.select({glob!r})", [problem], user_line())
        return found

    def do(self, primitive: Primitive) -> Self:
        """Apply ``primitive`` here; returns this node. Raises ScheduleError, changing nothing, if a rule is broken."""
        site = Site(self.state, self.path)
        problems = list(primitive.check(site))
        if problems:
            raise ScheduleError(f"{self._as_code()}.{primitive.as_call()}", problems, user_line())
        primitive.apply(site)
        # Not every step leaves a plan behind: a model with slices for weights must not pass for an untouched one.
        self.state.model.__dict__[_STEPS] = True
        self.state.history.append(Step(self.path, primitive, user_line()))
        return self

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

    def __str__(self) -> str:
        from .show import tree

        return tree(self)

    def __repr__(self) -> str:
        return f"<Schedule {self.path or '(root)'}: {type(self.module).__name__}>"

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


def _matches(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(names[i:], pattern[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
