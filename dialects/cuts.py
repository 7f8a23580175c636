"""The cuts of a schedule for a mesh: its own, those that were asked for, or automatic ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from partbook.core import Problem, Schedule, ScheduleError, user_line
from partbook.core.pipeline import MEASURES

AUTO = "auto"


def cut(sch: Schedule, cuts: str | Sequence[str] | None, device: torch.device | str, stages: int | None = None) -> None:
    """Cut the schedule into ``stages`` (default: one for each pipeline rank), unless it has cut itself.

    ``cuts``: paths (a sequence, or text with commas), "auto" (the default: balanced by FLOPs) or "auto:MEASURE". Where
    time is measured every rank takes the cuts of rank 0. Raises ScheduleError.
    """
    pp, chosen = sch.mesh.pp, parse_cuts(cuts)
    if sch.state.cuts and not isinstance(chosen, str):
        _refuse(
            cuts, f"the schedule cuts the model itself, after {', '.join(map(repr, sch.state.cuts))}", "leave out cuts"
        )
    if pp == 1:
        count = len(sch.state.cuts if isinstance(chosen, str) else chosen) + 1
        if count > 1:
            _refuse(cuts, f"there are cuts for {count} stages, more than the one rank of pp=1", f"pp={count}")
        return
    if sch.state.cuts:
        return
    if isinstance(chosen, str):
        _cut_automatically(sch, chosen.partition(":")[2] or "flops", device, stages)
        return
    for path in chosen:
        sch[path].cut_pipeline_stage()


def _cut_automatically(sch: Schedule, by: Any, device: torch.device | str, stages: int | None) -> None:
    if by != "time" or not dist.is_initialized() or dist.get_rank() == 0:
        sch.cut_pipeline_stages(stages, by=by, device=device)
    if by == "time" and dist.is_initialized():
        found: list[Any] = [list(sch.state.cuts)]
        dist.broadcast_object_list(found, src=0)
        for path in found[0] if not sch.state.cuts else []:
            sch[path].cut_pipeline_stage()


def cut_like(sch: Schedule, trial: Schedule) -> None:
    """Make the cuts that the rehearsal of the same schedule has, and take over what was traced for them."""
    for path in trial.state.cuts:
        if path not in sch.state.cuts:
            sch[path].cut_pipeline_stage()
    if sch.mesh.tp == 1:
        # With tp > 1 it has the process groups of its mesh in it, of which the rehearsal's has none.
        sch.state.pipeline = trial.state.pipeline


def check_cuts(cuts: str | Sequence[str] | None, pp: int) -> None:
    """Raise ValueError for what cannot cut a model into ``pp`` stages, whatever the model."""
    chosen = parse_cuts(cuts)
    if isinstance(chosen, str):
        by = chosen.partition(":")[2]
        if by and by not in MEASURES:
            raise ValueError(f"{chosen!r}: stages are balanced by one of {', '.join(MEASURES)}")
    elif len(chosen) != pp - 1:
        raise ValueError(f"{len(chosen)} cuts make {len(chosen) + 1} stages, and pp={pp}: give {pp - 1} paths")


def parse_cuts(cuts: str | Sequence[str] | None) -> str | list[str]:
    """ "auto" or "auto:MEASURE", or the paths."""
    if cuts is None:
        return AUTO
    if isinstance(cuts, str):
        return cuts if cuts.partition(":")[0] == AUTO else [path.strip() for path in cuts.split(",") if path.strip()]
    return list(cuts)


def _refuse(cuts: Any, found: str, hint: str) -> None:
    raise ScheduleError(f"cuts={cuts!r}", [Problem(found, hint)], user_line())
