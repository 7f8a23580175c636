"""Model schedules by name, file or function, their options, and applying one as a whole or not at all."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from .errors import Problem, ScheduleError, did_you_mean, user_line
from .schedule import Schedule, create_schedule
from .scheduled import build, check_finished

GROUP = "partbook.schedules"
DIALECTS = "partbook.dialects"
ScheduleFunction = Callable[..., Any]


@dataclass(frozen=True)
class ModelSchedule:
    """A schedule for one family of models: ``function(sch)`` or ``function(sch, options)``.

    ``models`` are class names that it is for; empty for any. The options are an instance of the dataclass that the
    function's second parameter is annotated with, or a plain dict where it is annotated with none.
    """

    name: str
    function: ScheduleFunction
    models: tuple[str, ...] = ()

    def options_type(self) -> type | None:
        """The dataclass of the options, ``dict`` for free ones, None where the function takes none."""
        parameters = [p for p in inspect.signature(self.function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if len(parameters) < 2:
            return None
        hint = typing.get_type_hints(self.function).get(parameters[1].name)
        return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else dict

    def __call__(self, sch: Schedule, options: Any = None) -> None:
        """Apply it step by step; ``apply_schedule`` does so as a whole."""
        arguments = (sch,) if self.options_type() is None else (sch, self.parse(options))
        self.function(*arguments)

    def parse(self, options: Any = None) -> Any:
        """The options out of an instance, a mapping (values may be text, as from a command line) or nothing.

        Raises ValueError that names an unknown option, with the near ones, or one whose value does not fit.
        """
        kind = self.options_type()
        if kind is not None and kind is not dict and isinstance(options, kind):
            return options
        given = dict(options or {})
        if kind is None and given:
            raise ValueError(f"schedule {self.name!r} takes no options, but got {sorted(given)}")
        if kind is None or kind is dict:
            return {key: _literal(value) for key, value in given.items()}
        hints = typing.get_type_hints(kind)
        for key in given:
            if key not in hints:
                raise ValueError(f"schedule {self.name!r} has no option {key!r}; {did_you_mean(key, hints)}")
        for field in dataclasses.fields(kind):
            if field.default is field.default_factory is dataclasses.MISSING and field.name not in given:
                raise ValueError(f"schedule {self.name!r} needs the option {field.name!r}")
        return kind(**{key: _convert(self.name, key, value, hints[key]) for key, value in given.items()})


_SCHEDULES: dict[str, ModelSchedule] = {}


def model_schedule(name: str, models: tuple[str, ...] = ()) -> Callable[[ScheduleFunction], ModelSchedule]:
    """Decorator: register a function as the schedule ``name`` for the model classes ``models``.

    A package makes its schedules known through the entry-point group ``partbook.schedules``. Raises ValueError when
    the name is taken by another function.
    """

    def register(function: ScheduleFunction) -> ModelSchedule:
        known = _SCHEDULES.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"the schedule {name!r} of {function.__module__} is taken by {known.function.__module__}")
        _SCHEDULES[name] = ModelSchedule(name, function, tuple(models))
        return _SCHEDULES[name]

    return register


def find_schedule(what: str | ScheduleFunction | ModelSchedule) -> ModelSchedule:
    """A schedule by its name, as ``file.py:function`` or ``package.module:function``, or as the function itself.

    Raises ValueError with the near names, or with what the file holds.
    """
    if isinstance(what, ModelSchedule):
        return what
    if callable(what):
        return ModelSchedule(getattr(what, "__name__", repr(what)), what)
    if ":" in what or what.endswith(".py"):
        return _from_code(what)
    points = {point.name: point for point in entry_points(group=GROUP)}
    if what not in _SCHEDULES and what in points:
        points[what].load()
    if what not in _SCHEDULES:
        hint = did_you_mean(what, sorted({*_SCHEDULES, *points}))
        raise ValueError(f"no schedule {what!r}; {hint} (one of your own: file.py:function)")
    return _SCHEDULES[what]


def find_dialect(name: str) -> Any:
    """The module of a dialect, by its name in the entry-point group ``partbook.dialects``.

    Raises ValueError with the near names.
    """
    points = {point.name: point for point in entry_points(group=DIALECTS)}
    if name not in points:
        raise ValueError(f"no dialect {name!r}; {did_you_mean(name, sorted(points))}")
    return points[name].load()


def _from_code(what: str) -> ModelSchedule:
    place, _, name = what.rpartition(":") if not what.endswith(".py") else (what, "", "schedule")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{place} has no function {name!r}; {did_you_mean(name, functions)}")
    return found if isinstance(found, ModelSchedule) else ModelSchedule(name, found)


def _import(name: str) -> Any:
    if not importlib.util.find_spec(name.split(".")[0]):
        raise ValueError(f"there is no module {name!r} to import a schedule from (a file is FILE.py:FUNCTION)")
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no schedule file {str(path)!r} (looked in {Path.cwd()})")
    name = f"partbook_schedule_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and saved histories look the module up by its name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def rehearse(
    sch: Schedule,
    what: str | ScheduleFunction | ModelSchedule,
    options: Any = None,
    then: Callable[[Schedule], None] | None = None,
) -> Schedule:
    """``apply_schedule`` on a copy of the model on the meta device: what ``sch`` would become. Touches nothing.

    ``then`` is done to the copy, such as automatic cuts, before it is built. Without it stages are not looked at.

    Raises ValueError for an unknown schedule or option, ScheduleError for a model that the schedule is not for and for
    every broken rule.
    """
    schedule = find_schedule(what)
    options = schedule.parse(options)
    _check_model(schedule, sch)
    trial = create_schedule(copy.deepcopy(sch.state.original.skeleton), sch.mesh.at(sch.mesh.rank))
    for step in sch.history:
        trial[step.path].do(step.primitive)
    for name, parameter in sch.state.model.named_parameters():
        if parameter.grad is not None:
            # The skeleton has none, and a primitive may refuse a parameter because of it.
            twin = trial.state.model.get_parameter(name)
            twin.grad = torch.empty_like(twin)
    schedule(_node(trial, sch.path), options)
    if then is None:
        check_finished(trial)
    else:
        then(trial)
        build(trial)
    return trial


def apply_schedule(sch: Schedule, what: str | ScheduleFunction | ModelSchedule, options: Any = None) -> Schedule:
    """Apply a whole model schedule, or nothing of it; returns ``sch``.

    It is rehearsed first, so whatever it refuses leaves the model as it was; its function is hence called twice.
    Raises as ``rehearse`` does.
    """
    rehearse(sch, what, options)
    find_schedule(what)(sch, options)
    return sch


def _node(sch: Schedule, path: str) -> Schedule:
    return sch[path] if path else sch


def _check_model(schedule: ModelSchedule, sch: Schedule) -> None:
    names = [cls.__name__ for cls in type(sch.module).__mro__]
    if not schedule.models or set(names) & set(schedule.models):
        return
    fitting = [point.name for point in entry_points(group=GROUP) if names[0] in _models_of(point.name)]
    hint = f"for {names[0]} there is {fitting}" if fitting else "write one of your own: file.py:function"
    problem = Problem(f"the schedule {schedule.name!r} is for {', '.join(schedule.models)}, not for {names[0]}", hint)
    raise ScheduleError(f"apply_schedule(sch, {schedule.name!r})", [problem], user_line())


def _models_of(name: str) -> tuple[str, ...]:
    return find_schedule(name).models


def _convert(schedule: str, key: str, value: Any, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    # None before str, which takes any text.
    kinds = sorted(typing.get_args(hint), key=lambda kind: kind is not types.NoneType) if union else [hint]
    for kind in kinds:
        parsed = _literal(value) if kind is not str else value
        if kind is float and type(parsed) is int:
            parsed = float(parsed)
        if typing.get_origin(kind) is typing.Literal:
            parsed = value if value in typing.get_args(kind) else parsed
        if _fits(parsed, kind):
            return parsed
    choices = ", ".join(map(repr, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else ""
    wanted = f"none of {choices}" if choices else f"no {hint if union else getattr(hint, '__name__', hint)}"
    raise ValueError(f"option {key}={value!r} of schedule {schedule!r} is {wanted}")


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    accepted = kind if isinstance(kind, type) else typing.get_origin(kind)
    if not isinstance(accepted, type):
        return True
    return isinstance(value, accepted) and not (kind is int and isinstance(value, bool))


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none"):
        value = value.capitalize()
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
