"""``initialize``: a scheduled model in DeepSpeed's own engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from partbook.core import (
    RUNTIMES,
    Mesh,
    PartbookError,
    Schedule,
    ScheduledModel,
    build,
    create_schedule,
    find_schedule,
    materialize,
    rehearse,
)
from partbook.core.pipeline import release

from ..arguments import schedule_options
from ..batches import check_first_batch
from ..cuts import cut, cut_like
from ..micro_batches import LossFunction
from ..ranks import agree_on_weights, check_sizes, make_mesh, seed_ranks
from .config import dtype_of, load, resolve
from .groups import check_groups, check_groups_of_stages, exchange
from .mpu import MeshUnit
from .pipeline import Feed, StageModule, attach
from .resume import resume_at_any_size
from .weights import refuse_partial_saves

# ZeRO-3's hooks fetch a module's parameters; those that are read elsewhere it fetches when they are read.
RUNTIMES["deepspeed"] = True

# The untouched one: a launcher may have put another in its place.
_deepspeed_initialize = deepspeed.initialize


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    schedule: Any = None,
    schedule_args: Any = None,
    tp: int | None = None,
    pp: int | None = None,
    cuts: str | Sequence[str] | None = None,
    loss_fn: LossFunction | None = None,
    weights: Any = None,
    world_batches: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with a schedule: the same arguments, the same four values.

    ``schedule`` (a name, ``file.py:function`` or a function), ``schedule_args`` (its options), ``tp``, ``pp`` and
    ``cuts`` default to the flags of ``add_schedule_arguments`` in ``args``. With pp > 1 the engine is DeepSpeed's
    ``PipelineEngine``, which trains with ``train_batch``: the schedule's own cuts make the stages, else ``cuts``
    (paths, or "auto": balanced by FLOPs; "auto:parameters", "auto:time"); the loss is the model's own, or
    ``loss_fn(output, labels)``. ``weights`` (a Hugging Face folder, a dense model, or an int that
    seeds fresh initialisation) fills a model on the meta device. The config is used as it is: batch sizes count
    dp = world / (tp * pp), 'auto' values are resolved; ``world_batches`` says that its train_batch_size was computed
    over all ranks and is to be put right. ``engine.scheduled`` is the scheduled model.

    Collective: every rank calls it. Raises ConfigError, ScheduleError, ValueError or WeightsError before the model, the
    optimizer or an engine is touched.
    """
    if model is None:
        raise ValueError("initialize requires a model")
    if mpu is not None or mesh_param is not None:
        raise ValueError("Partbook makes the mpu out of tp: leave out mpu and mesh_param")
    schedule, schedule_args = _from_arguments(args, schedule, schedule_args)
    tp, pp = (int(getattr(args, name, 1) if given is None else given) for name, given in (("tp", tp), ("pp", pp)))
    cuts = getattr(args, "cuts", None) if cuts is None else cuts
    parameters = None if model_parameters is None else list(model_parameters)
    config = load(config if config is not None else config_params, args)
    _init_distributed(distributed_port, dist_init_required)
    plan = Mesh(dp=check_sizes(tp, pp, dist.get_world_size()), pp=pp, tp=tp, rank=dist.get_rank())
    config = resolve(config, plan, model, args, world_batches)
    _refuse_partitioned(model)
    device = get_accelerator().current_device_name()
    trial = rehearse(create_schedule(model, plan), schedule, schedule_args, lambda sch: cut(sch, cuts, device))
    known = parameters if optimizer is None else optimizer
    check_groups(trial, model, known)
    check_groups_of_stages(trial, model, known, config)
    if weights is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device: pass weights= (a folder, a dense model, or a seed)")

    mesh = make_mesh(tp, pp)
    holders = [parameters, optimizer, lr_scheduler]
    scheduled = _schedule(model, mesh, schedule, schedule_args, trial, weights, holders)
    if scheduled.pipeline is not None:
        # As the engine will convert the model.
        scheduled.pipeline.convert(dtype_of(config) or next(model.parameters()).dtype)
    feed = Feed(scheduled, loss_fn) if scheduled.stages else None
    _mark_parameters(scheduled)
    seed_ranks(mesh)
    engine, *others = _deepspeed_initialize(
        args=_without_config(args),
        model=StageModule(scheduled, feed) if feed else model,
        optimizer=optimizer,
        model_parameters=parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=None if feed else MeshUnit(mesh),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config,
    )
    if feed:
        attach(engine, feed)
    else:
        check_first_batch(model, mesh)
    refuse_partial_saves(engine)
    resume_at_any_size(engine, scheduled)
    engine.scheduled = scheduled
    return (engine, *others)


def _from_arguments(args: Any, schedule: Any, schedule_args: Any) -> tuple[Any, Any]:
    if schedule is None:
        schedule = getattr(args, "schedule", None)
        if schedule is None:
            raise ValueError("no schedule: pass schedule=, or args with the flags of add_schedule_arguments")
    if schedule_args is None:
        schedule_args = schedule_options(getattr(args, "schedule_arg", []))
    return schedule, schedule_args


def _init_distributed(port: int, required: bool | None) -> None:
    skip_compiling_on_cpu()
    backend = get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, distributed_port=port, dist_init_required=required)


def skip_compiling_on_cpu() -> None:
    """Do without an operation that only inference needs, which ``init_distributed`` compiles for most of a minute."""
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _refuse_partitioned(model: nn.Module) -> None:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise PartbookError(
            "the model's parameters are partitioned already (deepspeed.zero.Init), so they cannot be split over tp\n"
            "  hint: build the model outside of zero.Init (transformers' from_pretrained and from_config enter it "
            "under ZeRO 3);\n        on the meta device, with weights=, no rank ever holds it whole"
        )


def _schedule(
    model: nn.Module, mesh: Mesh, schedule: Any, schedule_args: Any, trial: Schedule, weights: Any, holders: list[Any]
) -> ScheduledModel:
    """Schedule and fill the model; whoever holds its parameters gets the new ones."""
    before = dict(model.named_parameters())
    agree_on_weights(model, mesh)
    sch = create_schedule(model, mesh)
    find_schedule(schedule)(sch, schedule_args)
    cut_like(sch, trial)
    scheduled = build(sch)
    if scheduled.stages:
        release(model, scheduled.model)
    if weights is not None:
        materialize(scheduled, weights, device=get_accelerator().current_device_name())
    after = {
        id(before[source]): scheduled.model.get_parameter(name)
        for name, expression in scheduled.weights.items()
        for source in expression.names()
    }
    exchange(holders, after, {id(parameter) for parameter in before.values()} - after.keys())
    return scheduled


def _mark_parameters(scheduled: ScheduledModel) -> None:
    """DeepSpeed's gradient norm counts an unmarked parameter on tp rank 0 only, and in a pipeline on its first rank
    only (runtime/utils.py, 0.19)."""
    for name, parameter in scheduled.model.named_parameters():
        parameter.tensor_model_parallel = (  # type: ignore[attr-defined]
            bool(scheduled.stages) or name in scheduled.layouts
        ) and scheduled.counts_here(name)


def _without_config(args: Any) -> Any:
    """DeepSpeed refuses a config in args beside the one that is passed."""
    if args is None:
        return None
    args = copy.copy(args)
    for name in ("deepspeed_config", "deepscale_config"):
        if hasattr(args, name):
            setattr(args, name, None)
    return args
