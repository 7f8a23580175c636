"""Full weights and gradients out of a running engine, at any ZeRO stage."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import partbook.core as core
from partbook.core import PartbookError, ScheduledModel


def scheduled_of(engine: Any) -> ScheduledModel:
    """The scheduled model that ``initialize`` made the engine of. Raises PartbookError for another engine."""
    scheduled = getattr(engine, "scheduled", None)
    if scheduled is None:
        raise PartbookError(f"this {type(engine).__name__} was not made by partbook.dialects.deepspeed.initialize")
    return scheduled


def consolidate(engine: Any) -> dict[str, Tensor]:
    """The original model's full state dict, in the dtype that the engine trains in. Every rank calls it."""
    return core.consolidate(scheduled_of(engine), _read_weight)


def gradients(engine: Any) -> dict[str, Tensor]:
    """The gradient of every original parameter, full, averaged over dp; after ``backward`` of an accumulation boundary,
    before ``step``. Every rank calls it."""
    return core.gradients(scheduled_of(engine), safe_get_full_grad)


def save_pretrained(engine: Any, folder: str | Path, *, max_shard_size: int = 5 * 10**9) -> None:
    """Write a Hugging Face folder of the full model, which plain ``from_pretrained`` loads. Every rank calls it."""
    core.save_pretrained(scheduled_of(engine), folder, _read_weight, max_shard_size=max_shard_size)
    dist.barrier()


def _read_weight(parameter: nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def refuse_partial_saves(engine: Any) -> None:
    """DeepSpeed's 16-bit export writes one tp rank's slices as if they were the model (DeepSpeed#3607)."""
    engine.save_16bit_model = functools.partial(_refuse_16bit, "save_16bit_model")
    engine.save_fp16_model = functools.partial(_refuse_16bit, "save_fp16_model")


def _refuse_16bit(name: str, *_: Any, **__: Any) -> None:
    raise PartbookError(
        f"{name} would write this tp rank's slices as if they were the whole model\n"
        "  hint: partbook.dialects.deepspeed.save_pretrained(engine, folder), called on every rank"
    )
