"""Full weights and gradients out of Megatron's chunks, and a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partbook.core as core
from partbook.core import PartbookError, ScheduledModel

from .stage import StageModel

Chunks = nn.Module | Sequence[nn.Module]


def stages_of(model: Chunks) -> list[StageModel]:
    """The stage models inside Megatron's wrappers. Raises PartbookError for other models."""
    found = []
    for chunk in [model] if isinstance(model, nn.Module) else model:
        inner: Any = chunk
        while not isinstance(inner, StageModel):
            inner = getattr(inner, "module", None)
            if inner is None:
                raise PartbookError(f"this {type(chunk).__name__} was not made by partbook.dialects.megatron")
        found.append(inner)
    return found


def scheduled_of(model: Chunks) -> ScheduledModel:
    """The scheduled model of a rank's chunks."""
    return stages_of(model)[0].scheduled


def consolidate(model: Chunks) -> dict[str, Tensor]:
    """The original model's full state dict, in the dtype that Megatron trains in. Every rank calls it."""
    _gather_parameters(model)
    return core.consolidate(scheduled_of(model))


def gradients(model: Chunks) -> dict[str, Tensor]:
    """The gradient of every original parameter, full, averaged over dp as Megatron does; after a schedule has run,
    before the optimizer's step. Every rank calls it."""
    read: dict[int, Tensor] = {}
    for chunk in [model] if isinstance(model, nn.Module) else model:
        read.update(_main_gradients(chunk))
    return core.gradients(scheduled_of(model), lambda parameter: read.get(id(parameter)))


def save_pretrained(model: Chunks, folder: str | Path, *, max_shard_size: int = 5 * 10**9) -> None:
    """Write a Hugging Face folder of the full model, which plain ``from_pretrained`` loads. Every rank calls it."""
    _gather_parameters(model)
    core.save_pretrained(scheduled_of(model), folder, max_shard_size=max_shard_size)
    dist.barrier()


def _gather_parameters(model: Chunks) -> None:
    """With overlapped parameter gathering an optimizer's step leaves that to the next forward."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        config: Any = getattr(chunk, "ddp_config", None)
        if config is not None and config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def _main_gradients(chunk: Any) -> Iterator[tuple[int, Tensor]]:
    """(id of a parameter, its whole gradient) of a DistributedDataParallel chunk, or of a bare one."""
    if not hasattr(chunk, "ddp_config"):
        yield from ((id(p), p.grad) for p in chunk.parameters() if p.grad is not None)
        return
    if not chunk.ddp_config.use_distributed_optimizer:
        yield from ((id(p), p.main_grad) for p in chunk.parameters() if p.requires_grad)
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        whole = torch.cat([_whole(bucket, buffer.data_parallel_group) for bucket in buffer.buckets])
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            yield id(parameter), whole[start:stop].view(parameter.shape)


def _whole(bucket: Any, group: Any) -> Tensor:
    """The gradients of a bucket, of which each dp rank has reduced its own shard."""
    shard = bucket.grad_data.chunk(group.size())[group.rank()].contiguous()
    whole = torch.empty_like(bucket.grad_data)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole
