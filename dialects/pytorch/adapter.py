"""Plain PyTorch: a scheduled model ready to train, and its gradient norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from partbook.core import Mesh, ScheduledModel, apply_schedule, build, create_schedule, materialize, rehearse

from ..batches import check_first_batch
from ..ranks import agree_on_weights, make_mesh, seed_ranks


def initialize(
    model: nn.Module,
    schedule: Any,
    schedule_args: Any = None,
    *,
    mesh: Mesh | None = None,
    tp: int = 1,
    weights: Any = None,
    device: torch.device | str | None = None,
) -> tuple[nn.Module, ScheduledModel]:
    """Schedule ``model`` and make it ready to train: (the module to call, the scheduled model).

    ``weights`` (a folder, a dense model, a seed) fills a model on the meta device. With dp > 1 the module is wrapped in
    DistributedDataParallel over the dp group. Random streams are made equal within a tp group and different between dp
    ranks; the first batch is checked to be the same on all ranks of a tp group.
    """
    mesh = mesh or make_mesh(tp)
    sch = create_schedule(model, mesh)
    rehearse(sch, schedule, schedule_args)
    if weights is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device: pass weights= (a folder, a dense model, or a seed)")
    agree_on_weights(model, mesh)
    scheduled = build(apply_schedule(sch, schedule, schedule_args))
    if weights is not None:
        materialize(scheduled, weights, device=device)
    if device is not None:
        model.to(device)
    seed_ranks(mesh)
    check_first_batch(model, mesh)
    if mesh.dp == 1:
        return model, scheduled
    return DistributedDataParallel(model, process_group=mesh.dp_group), scheduled


def clip_grad_norm_(scheduled: ScheduledModel, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm over the whole model is at most ``max_norm``; returns the norm before.

    A slice counts on every rank that holds a different one, a replicated parameter once. Collective over tp.
    """
    mesh = scheduled.mesh
    grads = [(name, p.grad) for name, p in scheduled.model.named_parameters() if p.grad is not None]
    squares = [
        grad.float().pow(2).sum() if grad.dtype != torch.float64 else grad.pow(2).sum()
        for name, grad in grads
        if scheduled.counts_here(name)
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=next(scheduled.model.parameters()).device)
    if mesh.tp > 1:
        dist.all_reduce(total, group=mesh.tp_group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm
