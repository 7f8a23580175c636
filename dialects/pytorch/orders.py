"""The pipeline schedules of torch.distributed.pipelining: which there are, and what each of them can run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from partbook.core.errors import did_you_mean
from partbook.core.pipeline import Placement

# name -> stages on each rank: exactly that many, or any number from one (0)
_STAGES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 0,
    "LoopedBFS": 0,
    "InterleavedZeroBubble": 0,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
_THERE_AND_BACK = ("ZBVZeroBubble", "DualPipeV")


def find_order(name: str) -> str:
    """torch's spelling of a schedule's name. Raises ValueError with the near ones."""
    known = {one.lower(): one for one in _STAGES}
    if name.lower() not in known:
        raise ValueError(f"no pipeline_schedule {name!r}; {did_you_mean(name, _STAGES, len(_STAGES))}")
    return known[name.lower()]


def usual_stages(order: str) -> int:
    """How many stages each rank gets where nobody says it."""
    return _STAGES[order] or 2


def placement_of(order: str) -> Placement:
    return "v" if order in _THERE_AND_BACK else "loop"


def check_order(order: str, stages: int, pp: int, micro_batches: int) -> None:
    """Raise ValueError where ``order`` cannot run so many stages or micro-batches; the latter torch itself refuses."""
    wanted = pp * _STAGES[order]
    if wanted and stages != wanted:
        several = ", ".join(name for name, count in _STAGES.items() if not count)
        raise ValueError(
            f"pipeline_schedule={order!r} runs {wanted} stages on pp={pp} ranks, and there are {stages}\n"
            f"  hint: {wanted - 1} cuts; {several} run any multiple of pp"
        )
    local = [SimpleNamespace(num_stages=stages, group_size=pp, group_rank=0, stage_index=0, submod=None)]
    try:
        make_order(order, local * (stages // pp), micro_batches, None)
    except ValueError as error:
        raise ValueError(f"pipeline_schedule={order!r} cannot run micro_batches={micro_batches}: {error}") from error


def make_order(order: str, stages: list[Any], micro_batches: int, loss_fn: Any) -> Any:
    """torch's schedule for the stages of this rank; it leaves gradients as they come."""
    made = get_schedule_class(order)
    given = stages[0] if issubclass(made, PipelineScheduleSingle) else stages
    return made(given, micro_batches, loss_fn=loss_fn, scale_grads=False)


def make_forward_order(order: str, stages: list[Any], micro_batches: int, loss_fn: Any) -> Any:
    """One for any number of micro-batches, to be evaluated with."""
    if placement_of(order) == "v":
        return make_order("ZBVZeroBubble", stages, micro_batches, loss_fn)
    return make_order("GPipe" if _STAGES[order] == 1 else "LoopedBFS", stages, micro_batches, loss_fn)
