"""The applied steps of a schedule: printable, saved as JSON, replayed on a fresh copy of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from .mesh import Mesh
from .primitive import Primitive

if TYPE_CHECKING:
    from .schedule import Schedule

_FORMAT = 1


@dataclass(frozen=True)
class Step:
    """One applied primitive, and the line of the user's program that applied it."""

    path: str
    primitive: Primitive
    where: str = ""

    def __str__(self) -> str:
        node = f"sch[{self.path!r}]" if self.path else "sch"
        return f"{node}.{self.primitive.as_call()}"


class History(Sequence[Step]):
    """The steps in the order in which they were applied."""

    def __init__(self, steps: Sequence[Step] = (), mesh: Mesh | None = None) -> None:
        self._steps = list(steps)
        self._mesh = mesh or Mesh()

    def append(self, step: Step) -> None:
        self._steps.append(step)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._steps[index]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return [(s.path, s.primitive) for s in self] == [(s.path, s.primitive) for s in other]

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def to_json(self) -> str:
        """The steps as text. Raises ValueError where an argument cannot be saved (a module, a lambda)."""
        steps = [
            {"path": step.path, "verb": step.primitive.verb, "arguments": step.primitive.to_json()} for step in self
        ]
        mesh = {"dp": self._mesh.dp, "pp": self._mesh.pp, "tp": self._mesh.tp}
        return json.dumps({"partbook history": _FORMAT, "mesh": mesh, "steps": steps}, indent=1)

    @staticmethod
    def from_json(text: str) -> History:
        content = json.loads(text)
        if content.get("partbook history") != _FORMAT:
            raise ValueError(f"not a history of format {_FORMAT}: it says {content.get('partbook history')!r}")
        steps = [Step(s["path"], Primitive.from_json(s["verb"], s["arguments"])) for s in content["steps"]]
        return History(steps, Mesh(**content["mesh"]))

    def replay(self, model: nn.Module, mesh: Mesh | None = None) -> Schedule:
        """The same steps on a fresh copy of the model; the result is identical.

        Raises ValueError when ``mesh`` has another tp: the steps hold sizes of one rank's part.
        """
        from .schedule import create_schedule

        mesh = mesh or self._mesh
        if mesh.tp != self._mesh.tp:
            raise ValueError(f"the history was made for tp={self._mesh.tp} and cannot be replayed on tp={mesh.tp}")
        sch = create_schedule(model, mesh)
        for step in self:
            sch[step.path].do(step.primitive)
        return sch
