"""What a checkpoint's files hold, in a file beside them: which parameters each rank has, and what they are made of.

DeepSpeed's files say how it has cut up a rank's tensors; what these are slices of only the schedule knows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from partbook.core import Layout, Mesh, PartbookError, ScheduledModel
from partbook.core.weights import Expression, from_json, to_json

NAME = "partbook.json"
_FORMAT = 1


@dataclass(frozen=True)
class Held:
    """One parameter of a rank: how it is split over tp, and which original parameters it is made of."""

    layout: Layout | None
    made_of: Expression


@dataclass(frozen=True)
class Manifest:
    """``held[pp_rank]`` are the parameters of a pipeline rank by name; ``order[model rank]`` their names in the order
    of the optimizer."""

    mesh: Mesh
    zero: int
    shapes: Mapping[str, tuple[int, ...]]
    held: tuple[Mapping[str, Held], ...]
    order: tuple[tuple[str, ...], ...]

    def content(self) -> Any:
        """As it is written, and compared."""
        content = {
            "partbook checkpoint": _FORMAT,
            "mesh": {"dp": self.mesh.dp, "pp": self.mesh.pp, "tp": self.mesh.tp},
            "zero": self.zero,
            "shapes": self.shapes,
            "held": [{name: _held_to_json(one) for name, one in held.items()} for held in self.held],
            "order": self.order,
        }
        return json.loads(json.dumps(content))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_text(json.dumps(self.content()))

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """None where there is none. Raises PartbookError for one of another format."""
        if not (folder / NAME).is_file():
            return None
        content = json.loads((folder / NAME).read_text())
        if content.get("partbook checkpoint") != _FORMAT:
            found = content.get("partbook checkpoint")
            raise PartbookError(f"{folder / NAME} has format {found!r}, and this version reads {_FORMAT}")
        return Manifest(
            Mesh(**content["mesh"]),
            content["zero"],
            {name: tuple(shape) for name, shape in content["shapes"].items()},
            tuple({name: _held_from_json(one) for name, one in held.items()} for held in content["held"]),
            tuple(map(tuple, content["order"])),
        )


def manifest_of(engine: Any, scheduled: ScheduledModel) -> Manifest:
    """Of the running engine. Collective: every rank calls it."""
    mesh = scheduled.mesh
    held = {name: Held(scheduled.layouts.get(name), made) for name, made in scheduled.weights.items()}
    mine = held, optimizer_order(engine, scheduled)
    everyone: list[Any] = [None] * (mesh.pp * mesh.tp)
    if mesh.model_group is None:
        everyone = [mine]
    else:
        dist.all_gather_object(everyone, mine, group=mesh.model_group)
    return Manifest(
        mesh.at(0),
        engine.zero_optimization_stage(),
        {name: tuple(shape) for name, shape in scheduled.original.shapes.items()},
        tuple(held for held, _ in everyone[:: mesh.tp]),
        tuple(order for _, order in everyone),
    )


def optimizer_order(engine: Any, scheduled: ScheduledModel) -> tuple[str, ...]:
    """The parameters of an optimizer that has them themselves; empty for one that has flat copies."""
    names = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
    found = [p for group in getattr(engine.optimizer, "param_groups", ()) for p in group["params"]]
    return tuple(names[id(p)] for p in found) if all(id(p) in names for p in found) else ()


def _held_to_json(held: Held) -> dict[str, Any]:
    layout = None if held.layout is None else dataclasses.asdict(held.layout)
    return {"layout": layout, "made_of": to_json(held.made_of)}


def _held_from_json(content: Mapping[str, Any]) -> Held:
    layout = content["layout"]
    if layout is not None:
        layout = Layout(**{**layout, "shape": tuple(layout["shape"]), "segments": tuple(layout["segments"])})
    return Held(layout, from_json(content["made_of"]))
