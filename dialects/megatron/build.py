"""From a model, a schedule and Megatron's configuration to the stage models of a rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from partbook.core import (
    RUNTIMES,
    Mesh,
    Schedule,
    ScheduledModel,
    build,
    create_schedule,
    find_schedule,
    materialize,
    rehearse,
)
from partbook.core.loss import loss_follows
from partbook.core.pipeline import release, subtree
from partbook.core.state import skeleton_of
from partbook.core.tracing.examples import default_inputs, tensors_of

from ..cuts import cut, cut_like, parse_cuts
from ..ranks import agree_on_weights, refuse_different, spread
from .batch import StageNames
from .config import ConfigError, check, find_config, layers_of, with_sequence
from .groups import mesh_of
from .layers import lower
from .loss import TokenLoss, head_layout
from .marks import check_ties, mark
from .runtime import use_runtime
from .stage import StageModel
from .wire import Wire, wires_of

# With overlap_param_gather, hooks wait for the parameters of the module that is called next.
RUNTIMES["megatron"] = False

# Tells the models of one world apart; every rank makes the same ones.
_numbers = itertools.count()


class Asked(NamedTuple):
    """What Megatron asks a provider for; None where it leaves the place to the provider."""

    pre_process: bool | None
    post_process: bool | None
    vp_stage: int | None

    def contradicts(self, index: int, is_first: bool, is_last: bool) -> str | None:
        """How this is not stage ``index``, None where it is."""
        for name, asked, found in (
            ("pre_process", self.pre_process, is_first),
            ("post_process", self.post_process, is_last),
        ):
            if asked is not None and asked != found:
                return (
                    f"{name}={asked} was asked of stage {index}, whose {name} is {found}: pass what "
                    "parallel_state.is_pipeline_first_stage and is_pipeline_last_stage say"
                )
        return None


def build_chunks(
    build_model: Callable[[], nn.Module], groups: Any, given: TransformerConfig | Mapping[str, Any] | None,
    asked: Asked, *, schedule: Any, schedule_args: Any, cuts: Any, weights: Any,
) -> list[StageModel]:  # fmt: skip
    """The stage models of this rank, in the order of their virtual stages, the first of which is asked for.
    Collective."""
    mesh = mesh_of(groups)
    if schedule is None:
        raise ConfigError("no schedule: a name, FILE.py:FUNCTION or a function (--schedule)")
    refuse_different(weights)
    model = build_model()
    model_config = getattr(model, "config", None)
    if model_config is None:
        raise ConfigError(f"{type(model).__name__} has no config: Megatron needs the sizes of a transformers model")
    options = find_schedule(schedule).parse(schedule_args)
    config = find_config(model_config, given, getattr(options, "sequence_parallel", None))
    check(config, model_config, mesh)
    options = with_sequence(options, config)
    count = _count_stages(config, model_config, cuts, mesh)
    _check_place(asked, count, mesh)
    device = _device(config)
    # What is refused is refused of a copy without weights.
    skeleton = skeleton_of(model)
    _convert(skeleton, config.params_dtype)

    def cut_it(sch: Schedule) -> None:
        _prepare(sch)
        cut(sch, cuts, device, count)

    with loss_follows():
        trial = rehearse(create_schedule(skeleton, mesh.at(mesh.rank)), schedule, options, cut_it)
    if mesh.pp > 1 and len(trial.state.cuts) + 1 != count:
        raise ConfigError(f"the cuts make {len(trial.state.cuts) + 1} stages, and Megatron runs {count}")
    _convert(model, config.params_dtype)
    scheduled = _schedule(model, mesh, schedule, options, trial)
    check_ties(scheduled)
    wires = _wires(scheduled, config, trial.state.example_inputs)
    scheduled = lower(scheduled, config)
    use_runtime(scheduled.model)
    _fill(scheduled, weights, device)
    mark(scheduled, config)
    if wires:
        # What Megatron's schedules must know of the boundaries.
        config.pipeline_dtype = wires[0].dtype
        config.variable_seq_lengths |= not all(wire.is_hidden for wire in wires)
    return _stage_models(scheduled, config, groups, wires)


def _count_stages(config: TransformerConfig, model_config: Any, cuts: Any, mesh: Mesh) -> int:
    virtual = config.virtual_pipeline_model_parallel_size or 1
    count, layers = mesh.pp * virtual, layers_of(model_config)
    if virtual > 1 and mesh.pp == 1:
        raise ConfigError(f"{virtual} virtual stages a rank interleave the stages of a pipeline, and pp is 1")
    if virtual > 1 and isinstance(parse_cuts(cuts), str) and layers % count:
        works = [n for n in range(1, layers // mesh.pp + 1) if layers % (mesh.pp * n) == 0]
        raise ConfigError(
            f"{layers} layers do not divide into pp={mesh.pp} x vp={virtual} = {count} stages; vp could be one of "
            f"{works}, or give the cuts yourself"
        )
    return count


def _check_place(asked: Asked, count: int, mesh: Mesh) -> None:
    """Raise ConfigError on every rank where one of them is asked for a stage that it does not have."""
    problem = asked.contradicts(mesh.pp_rank, mesh.pp_rank == 0, mesh.pp_rank == count - 1)
    if count > mesh.pp and asked.vp_stage is None:
        problem = f"Megatron runs {count // mesh.pp} virtual stages a rank: ask for each by vp_stage, from 0"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    for rank, found in enumerate(everyone):
        if found is not None:
            raise ConfigError(found if rank == mesh.rank else f"rank {rank}: {found}")


def _device(config: TransformerConfig) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: Megatron's Float16Module comes later, and rotary frequencies stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _prepare(sch: Schedule) -> None:
    """Have the model cut for the logits: its own loss shifts labels, and gives their mean."""
    state = sch.state
    state.only_output = "logits"
    defaults = default_inputs(state.model, sch.mesh.tp)
    looks = dict(state.example_inputs or (defaults[0] if defaults else {}))
    labels = looks.pop("labels", None)
    if getattr(state.model.config, "is_encoder_decoder", False) and labels is not None:
        looks["decoder_input_ids"] = labels
    # none: the cut says that it needs some
    state.example_inputs = looks or None


def _schedule(model: nn.Module, mesh: Mesh, schedule: Any, options: Any, trial: Schedule) -> ScheduledModel:
    agree_on_weights(model, mesh)
    sch = create_schedule(model, mesh)
    find_schedule(schedule)(sch, options)
    _prepare(sch)
    if mesh.pp > 1:
        cut_like(sch, trial)
    with loss_follows():
        scheduled = build(sch)
    if scheduled.stages:
        release(model, scheduled.model)
    return scheduled


def _wires(scheduled: ScheduledModel, config: TransformerConfig, looks: Mapping[str, Any] | None) -> list[Wire]:
    """The boundaries between stages, all of one dtype."""
    pipeline, mesh = scheduled.pipeline, scheduled.mesh
    if pipeline is None or looks is None:
        return []
    with loss_follows():
        wiring = pipeline.wiring(looks, training=True)
    known = tensors_of(looks, pipeline.skeleton)
    batch, length = known["input_ids"].shape
    length //= mesh.tp if config.sequence_parallel else 1
    wires = wires_of(
        wiring.at(wiring.values(pipeline.skeleton, known)), (batch, length, config.hidden_size), config.params_dtype
    )
    dtype = wires[0].dtype
    for wire in wires:
        dtype = torch.promote_types(dtype, wire.dtype)
    return [dataclasses.replace(wire, dtype=dtype) for wire in wires]


def _fill(scheduled: ScheduledModel, weights: Any, device: torch.device) -> None:
    if weights is None and any(parameter.is_meta for parameter in scheduled.model.parameters()):
        # Stages and tp ranks have random streams of their own in Megatron; a model has one initialisation.
        seed: list[Any] = [torch.initial_seed()]
        dist.broadcast_object_list(seed, src=0)
        weights = seed[0]
    if weights is not None:
        materialize(scheduled, weights, device=device)
        return
    scheduled.model.to(device)
    spread(scheduled)


def _stage_models(
    scheduled: ScheduledModel, config: TransformerConfig, groups: Any, wires: list[Wire]
) -> list[StageModel]:
    mesh, model = scheduled.mesh, scheduled.model
    number = next(_numbers)
    if scheduled.pipeline is None:
        loss = TokenLoss(config, mesh, head_layout(scheduled, model))
        return [StageModel(config, scheduled, model, 0, None, groups, wires, loss, None)]
    is_virtual = len(scheduled.stages) > mesh.pp
    store = dist.distributed_c10d._get_default_store()
    found: list[StageModel] = []
    for stage in scheduled.stages:
        if stage.module is None:
            continue
        module = subtree(model, scheduled.pipeline.held[stage.index])
        loss = TokenLoss(config, mesh, head_layout(scheduled, module))
        names = StageNames(store, f"partbook/{number}/{mesh.dp_rank}/{mesh.tp_rank}")
        vp_stage = len(found) if is_virtual else None
        found.append(StageModel(config, scheduled, module, stage.index, vp_stage, groups, wires, loss, names))
    return found
