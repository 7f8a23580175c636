"""A user's DeepSpeed config, made concrete for a mesh: batch sizes, 'auto' values, and what cannot work refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import load_ds_config
from deepspeed.accelerator import get_accelerator
from packaging.version import Version
from torch import nn

from partbook.core import Mesh, PartbookError

logger = logging.getLogger(__name__)

Config = dict[str, Any]

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

# 'auto' in a config -> where transformers' TrainingArguments keep the value
_ARGUMENTS = {
    (MICRO,): "per_device_train_batch_size",
    (ACCUMULATION,): "gradient_accumulation_steps",
    ("gradient_clipping",): "max_grad_norm",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("scheduler", "params", "total_num_steps"): "max_steps",
    ("bf16", "enabled"): "bf16",
    ("bfloat16", "enabled"): "bf16",
    ("fp16", "enabled"): "fp16",
}

# the sections that turn on 16 bits; the second one is DeepSpeed's older name of the first
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


# the first DeepSpeed whose stages accumulate gradients rightly
_FIRST_WITH_STAGES = "0.19.3"


class ConfigError(PartbookError, ValueError):
    """A DeepSpeed config that cannot work on this mesh. Nothing was started."""


def load(config: Any, args: Any) -> Config:
    """The config as a dict of its own, from a dict, a path, or ``args.deepspeed_config``. Raises ConfigError."""
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and in_args is not None:
        raise ConfigError("a DeepSpeed config was passed twice: as config= and as args.deepspeed_config")
    config = in_args if config is None else config
    if config is None:
        raise ConfigError("no DeepSpeed config: pass config= (a dict or a path) or --deepspeed_config FILE")
    if isinstance(config, dict):
        return copy.deepcopy(config)
    try:
        loaded = load_ds_config(str(config))
    except ValueError as error:
        if Path(config).is_file():
            raise ConfigError(f"the DeepSpeed config {str(config)!r} cannot be read: {error}") from error
        raise ConfigError(f"there is no DeepSpeed config {str(config)!r} (looked in {Path.cwd()})") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the DeepSpeed config {str(config)!r} holds no keys and values")
    return loaded


def resolve(config: Config, mesh: Mesh, model: nn.Module, args: Any = None, world_batches: bool = False) -> Config:
    """``config`` with batch sizes for ``mesh`` and without 'auto'; changes it in place and returns it.

    ``world_batches``: train_batch_size was computed over all ranks, as transformers does, and is put right. Raises
    ConfigError, with the numbers, for what cannot work.
    """
    _refuse_unsupported(config, mesh)
    _fill_autos(config, model, args)
    _refuse_low_precision_without_zero(config, mesh)
    if mesh.pp > 1:
        _refuse_with_stages(config)
        _prepare_for_stages(config)
    _resolve_batches(config, mesh, world_batches)
    _avoid_compiling_on_cpu(config)
    return config


def _refuse_unsupported(config: Config, mesh: Mesh) -> None:
    autotp = config.get("tensor_parallel", {}).get("autotp_size", 0)
    if isinstance(autotp, int) and autotp > 1:
        raise ConfigError(
            f"the config asks for DeepSpeed's own AutoTP (tensor_parallel.autotp_size={autotp}), and the schedule "
            f"splits the model over tp={mesh.tp} itself\n"
            "  hint: remove tensor_parallel from the config, or the schedule"
        )
    if config.get("sequence_parallel_size", 1) not in (None, 1):
        raise ConfigError("sequence_parallel_size (Ulysses) cannot be combined with a schedule's tensor parallelism")


def _refuse_low_precision_without_zero(config: Config, mesh: Mesh) -> None:
    stage = _zero(config).get("stage", 0)
    for name, dtype in _DTYPES.items():
        # A PipelineEngine has an optimizer of its own for bf16.
        works = mesh.pp > 1 and dtype is torch.bfloat16
        if config.get(name, {}).get("enabled") and stage == 0 and not works:
            raise ConfigError(
                f"{name} with ZeRO stage 0 trains wrongly in DeepSpeed: its optimizer makes an empty step first, and "
                "its gradient norm leaves out ranks\n"
                '  hint: set "zero_optimization": {"stage": 1}, or use "torch_autocast" with fp32 weights'
            )


def _refuse_with_stages(config: Config) -> None:
    """What DeepSpeed's PipelineEngine cannot do, or does wrongly, with pipeline stages."""
    if Version(deepspeed.__version__) < Version(_FIRST_WITH_STAGES):
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} scales the gradients of pipeline stages wrongly when it accumulates "
            f"them (DeepSpeed#8152)\n  hint: pip install 'deepspeed>={_FIRST_WITH_STAGES}'"
        )
    stage = _zero(config).get("stage", 0)
    if stage > 1:
        raise ConfigError(
            f"ZeRO stage {stage} cannot be combined with pipeline stages: it partitions gradients that they accumulate"
            '\n  hint: set "zero_optimization": {"stage": 1}'
        )
    if config.get("torch_autocast", {}).get("enabled"):
        raise ConfigError(
            "torch_autocast cannot be combined with pipeline stages, whose boundaries have the dtypes of the model"
            '\n  hint: set "bf16": {"enabled": true} instead'
        )
    pipeline = config.get("pipeline", {})
    if pipeline.get("activation_checkpoint_interval"):
        raise ConfigError(
            "pipeline.activation_checkpoint_interval counts layers of a PipelineModule, and a stage is one layer here"
            "\n  hint: checkpoint() in the schedule, or its option checkpoint_ratio"
        )
    for name in ("pipe_partitioned", "grad_partitioned"):
        if pipeline.get(name):
            raise ConfigError(f"pipeline.{name} is not supported: activations are sent whole\n  hint: leave it out")


def _prepare_for_stages(config: Config) -> None:
    # On by default under tensor parallelism, where it takes one tensor with a gradient only.
    config.setdefault("pipeline", {}).update(pipe_partitioned=False, grad_partitioned=False)


def dtype_of(config: Config) -> torch.dtype | None:
    """The 16-bit dtype that the engine converts a model to; None where it leaves the model as it is."""
    return next((dtype for name, dtype in _DTYPES.items() if config.get(name, {}).get("enabled")), None)


def _zero(config: Config) -> Config:
    zero = config.get("zero_optimization", {})
    # DeepSpeed still takes the form that ZeRO had when it had one stage
    return {"stage": int(zero)} if isinstance(zero, bool) else zero


def _fill_autos(config: Config, model: nn.Module, args: Any) -> None:
    for path in list(_autos(config)):
        value = _auto_value(path, config, model, args)
        node, key = _node(config, path)
        if value is None:
            # Left out, it is the framework's default, or is computed from the other batch sizes.
            del node[key]
        else:
            node[key] = value
        logger.info("%s: 'auto' becomes %s", ".".join(path), "the default" if value is None else value)


def _auto_value(path: tuple[str, ...], config: Config, model: nn.Module, args: Any) -> Any:
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    by_hidden = {
        "reduce_bucket_size": lambda h: h * h,
        "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        "stage3_param_persistence_threshold": lambda h: 10 * h,
    }
    if path[-1] in by_hidden:
        return by_hidden[path[-1]](hidden) if hidden else None
    if path == ("optimizer", "params", "betas") and hasattr(args, "adam_beta1"):
        return [args.adam_beta1, args.adam_beta2]
    value = getattr(args, _ARGUMENTS.get(path, ""), None)
    # transformers' max_steps is -1 where the epochs say how many there are
    if value is not None and not (path[-1] == "total_num_steps" and value < 1):
        return value
    if path[0] in _DTYPES and path[-1] == "enabled":
        return next(model.parameters()).dtype == _DTYPES[path[0]]
    if path[-1] in ("lr", "warmup_max_lr", "total_num_steps"):
        raise ConfigError(f"{'.'.join(path)} is 'auto', but nothing says its value\n  hint: give a number")
    return None


def _autos(config: Config, prefix: tuple[str, ...] = ()) -> Any:
    for key, value in config.items():
        if value == "auto":
            yield (*prefix, key)
        elif isinstance(value, dict):
            yield from _autos(value, (*prefix, key))


def _node(config: Config, path: tuple[str, ...]) -> tuple[Config, str]:
    for key in path[:-1]:
        config = config[key]
    return config, path[-1]


def _resolve_batches(config: Config, mesh: Mesh, world_batches: bool) -> None:
    batch, micro, accumulation = (config.get(key) for key in (BATCH, MICRO, ACCUMULATION))
    for key in (BATCH, MICRO, ACCUMULATION):
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{key} is {value!r}, not a positive integer")
    dp = mesh.dp
    if batch and micro and accumulation and batch != micro * accumulation * dp:
        if not (world_batches and batch == micro * accumulation * mesh.size):
            raise ConfigError(_contradiction(batch, micro, accumulation, mesh))
        batch = micro * accumulation * dp
    elif batch and not micro:
        micro = _divide(batch, (accumulation or 1) * dp, MICRO, config, mesh)
    elif batch and micro and not accumulation:
        accumulation = _divide(batch, micro * dp, ACCUMULATION, config, mesh)
    if not micro:
        raise ConfigError(f"the config gives neither {BATCH} nor {MICRO}")
    accumulation = accumulation or 1
    config.update({BATCH: micro * accumulation * dp, MICRO: micro, ACCUMULATION: accumulation})


def _contradiction(batch: int, micro: int, accumulation: int, mesh: Mesh) -> str:
    text = (
        f"the batch sizes contradict each other: {BATCH}={batch}, but {MICRO}={micro} * "
        f"{ACCUMULATION}={accumulation} * dp={mesh.dp} = {micro * accumulation * mesh.dp} "
        f"(dp = {mesh.size} ranks / tp={mesh.tp}{f' / pp={mesh.pp}' if mesh.pp > 1 else ''})"
    )
    if batch == micro * accumulation * mesh.size:
        text += f"\n  they were written for {mesh.size} data-parallel ranks"
    keep = batch / (micro * mesh.dp)
    hint = f"{BATCH}={micro * accumulation * mesh.dp}"
    if keep == int(keep):
        hint += f", or {ACCUMULATION}={int(keep)} to keep the batch"
    return f"{text}\n  hint: {hint}; or leave one of the three out"


def _divide(batch: int, by: int, wanted: str, config: Config, mesh: Mesh) -> int:
    if batch % by:
        given = {key: config[key] for key in (MICRO, ACCUMULATION) if config.get(key)}
        factors = " * ".join([*(f"{key}={value}" for key, value in given.items()), f"dp={mesh.dp}"])
        raise ConfigError(f"{BATCH}={batch} does not divide by {factors}, so there is no {wanted}")
    return batch // by


def _avoid_compiling_on_cpu(config: Config) -> None:
    """The torch implementation of Adam where DeepSpeed would compile its own for minutes to run the same arithmetic."""
    optimizer = config.get("optimizer", {})
    is_adam = optimizer.get("type", "").lower() in ("adam", "adamw")
    if is_adam and get_accelerator().device_name() == "cpu" and not _zero(config).get("offload_optimizer"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
