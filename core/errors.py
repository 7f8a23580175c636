"""Errors that name the call, the place in the user's program, the rule, and what would work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

_OWN_PACKAGES = ("partbook.", "runpy", "contextlib")


@dataclass(frozen=True)
class Problem:
    """One broken rule: what was ``found``, and a ``hint`` that says what would work."""

    found: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.found}\n  hint: {self.hint}" if self.hint else self.found


class PartbookError(Exception):
    """The base of every error that Partbook raises for its user."""


class ScheduleError(PartbookError, ValueError):
    """A call that breaks a rule of the schedule language. Model and schedule are as they were before it.

    Fails::

        sch["mlp"].shard("weight", axis=0)        # ScheduleError: LlamaMLP has no parameter 'weight'

    Works::

        sch["mlp.up_proj"].shard("weight", axis=0)
    """

    def __init__(self, call: str, problems: Sequence[Problem], where: str = "") -> None:
        self.call, self.problems, self.where = call, tuple(problems), where
        lines = [call, *([f"  at {where}"] if where else []), *(f"  {problem}" for problem in problems)]
        super().__init__("\n".join(lines))


class TraceError(PartbookError, RuntimeError):
    """A module whose forward cannot be recorded as a graph: its path, the line and the construct. It is unchanged."""


class GuardError(PartbookError, RuntimeError):
    """A call that no graph of a traced module is good for: what the graphs were specialised on, and what was found."""


class WeightsError(PartbookError, ValueError):
    """Weights that do not fit the model: a missing tensor, another shape, an unreadable folder."""


class AgreementError(PartbookError, RuntimeError):
    """Ranks that must agree do not: batches of one tp group, parallel sizes, arguments."""


def user_line() -> str:
    """``file:line`` of the innermost frame that is not Partbook's own machinery ("" when there is none)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        file = frame.f_code.co_filename
        if not name.startswith(_OWN_PACKAGES) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def did_you_mean(name: str, known: Iterable[str], limit: int = 6) -> str:
    """A hint with the names nearest to ``name``, or with all of them where none is near."""
    names = list(known)
    near = get_close_matches(name, names, n=limit, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(map(repr, near))}?"
    listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f"there are {listed}" if names else "there are none"
