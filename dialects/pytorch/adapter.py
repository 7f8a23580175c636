"""Plain PyTorch: a scheduled model ready to train, and its gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from partbook.core import (
    Mesh,
    Schedule,
    ScheduledModel,
    apply_schedule,
    build,
    create_schedule,
    find_schedule,
    materialize,
    rehearse,
)
from partbook.core.pipeline import release

from ..batches import check_first_batch
from ..cuts import cut, cut_like
from ..micro_batches import LossFunction
from ..ranks import agree_on_weights, communication_device, make_mesh, seed_ranks, spread
from .orders import check_order, find_order, placement_of, usual_stages
from .pipeline import PipelineModel, sum_dtype


def initialize(
    model: nn.Module,
    schedule: Any,
    schedule_args: Any = None,
    *,
    mesh: Mesh | None = None,
    tp: int = 1,
    pp: int = 1,
    cuts: str | Sequence[str] | None = None,
    micro_batches: int | None = None,
    pipeline_schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    loss_fn: LossFunction | None = None,
    weights: Any = None,
    device: torch.device | str | None = None,
) -> tuple[Any, ScheduledModel]:
    """Schedule ``model`` and make it ready to train: (the module to call, the scheduled model).

    ``weights`` (a folder, a dense model, a seed) fills a model on the meta device. With dp > 1 the module is wrapped in
    DistributedDataParallel over the dp group. Random streams are made equal within a tp group and different between dp
    ranks; the first batch is checked to be the same on all ranks of a tp group.

    With pp > 1 the first value is a ``PipelineModel``, which trains with ``step(batch)``: ``micro_batches`` at a time
    in the order of ``pipeline_schedule``, one of torch.distributed.pipelining by its name there. The schedule's own
    cuts make the stages, else ``cuts`` (paths, or "auto": balanced by FLOPs; "auto:parameters", "auto:time"). Orders
    that interleave run several stages on each rank, ``stages_per_rank`` (default 2) of automatic cuts. The loss is the
    model's own, or ``loss_fn(output, labels)``.

    Collective. Raises ScheduleError or ValueError before the model is touched.
    """
    mesh = mesh or make_mesh(tp, pp)
    if mesh.pp > 1:
        if micro_batches is None or micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: pass into how many micro-batches a step cuts its batch")
        order = find_order(pipeline_schedule)
        trial = _rehearse_stages(model, mesh, schedule, schedule_args, cuts, order, stages_per_rank, device)
        check_order(order, len(trial.state.cuts) + 1, mesh.pp, micro_batches)
        _refuse_meta(model, weights)
        scheduled = _schedule_stages(model, mesh, schedule, schedule_args, trial, order)
        _fill(scheduled, weights, device)
        spread(scheduled)
        seed_ranks(mesh)
        return PipelineModel(scheduled, order, micro_batches, loss_fn, device), scheduled
    given = {"cuts": cuts, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank, "loss_fn": loss_fn}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}= is for a model that is cut into pipeline stages, and pp is 1")
    sch = create_schedule(model, mesh)
    rehearse(sch, schedule, schedule_args)
    _refuse_meta(model, weights)
    agree_on_weights(model, mesh)
    scheduled = build(apply_schedule(sch, schedule, schedule_args))
    _fill(scheduled, weights, device)
    seed_ranks(mesh)
    check_first_batch(model, mesh)
    if mesh.dp == 1:
        return model, scheduled
    return DistributedDataParallel(model, process_group=mesh.dp_group), scheduled


def _rehearse_stages(
    model: nn.Module,
    mesh: Mesh,
    schedule: Any,
    schedule_args: Any,
    cuts: Any,
    order: str,
    asked: int | None,
    device: Any,
) -> Schedule:
    """What the schedule and its cuts would make of the model."""
    if mesh.pp_group is None or mesh.model_group is None:
        raise ValueError(f"{mesh} has no process groups: make_mesh(tp, pp) gives a mesh that has")
    count = mesh.pp * (asked or usual_stages(order))
    sch = create_schedule(model, mesh)
    trial = rehearse(sch, schedule, schedule_args, lambda trial: cut(trial, cuts, device or "cpu", count))
    found = len(trial.state.cuts) + 1
    if asked is not None and found != count:
        raise ValueError(f"stages_per_rank={asked} on pp={mesh.pp} are {count} stages, and the cuts make {found}")
    return trial


def _schedule_stages(
    model: nn.Module, mesh: Mesh, schedule: Any, schedule_args: Any, trial: Schedule, order: str
) -> ScheduledModel:
    agree_on_weights(model, mesh)
    sch = create_schedule(model, mesh)
    find_schedule(schedule)(sch, schedule_args)
    cut_like(sch, trial)
    scheduled = build(sch, placement_of(order))
    release(model, scheduled.model)
    return scheduled


def _fill(scheduled: ScheduledModel, weights: Any, device: Any) -> None:
    if weights is not None:
        materialize(scheduled, weights, device=device)
    if device is not None:
        scheduled.model.to(device)


def _refuse_meta(model: nn.Module, weights: Any) -> None:
    if weights is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device: pass weights= (a folder, a dense model, or a seed)")


def clip_grad_norm_(scheduled: ScheduledModel, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm over the whole model is at most ``max_norm``; returns the norm before.

    A slice counts on every rank that holds a different one, a replicated parameter once, and one that several stages
    hold once. Collective over tp and pp.
    """
    mesh = scheduled.mesh
    grads = [(name, p.grad) for name, p in scheduled.model.named_parameters() if p.grad is not None]
    squares = [
        grad.float().pow(2).sum() if grad.dtype != torch.float64 else grad.pow(2).sum()
        for name, grad in grads
        if scheduled.counts_here(name)
    ]
    # Of the whole model, so that it is the same on a stage without parameters.
    dtype = sum_dtype(scheduled.model if scheduled.pipeline is None else scheduled.pipeline.skeleton)
    device = next((p.device for p in scheduled.model.parameters()), None) or communication_device(mesh)
    total = torch.zeros((), dtype=dtype, device=device)
    if squares:
        total += torch.stack(squares).sum()
    if mesh.tp * mesh.pp > 1:
        dist.all_reduce(total, group=mesh.model_group if mesh.pp > 1 else mesh.tp_group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm
