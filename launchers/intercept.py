"""What an unedited script meets under the launcher: a scheduled ``deepspeed.initialize``, data split over dp."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from partbook.core import Mesh
from partbook.dialects.deepspeed import consolidate, initialize
from partbook.dialects.deepspeed.arguments import schedule_options
from partbook.dialects.ranks import check_tp

_INITIALIZE_ARGUMENTS = ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler")


@contextmanager
def intercept(schedule: str, schedule_args: list[str], tp: int) -> Iterator[list[Any]]:
    """While the context is open, ``deepspeed.initialize`` schedules the model; yields the list of engines made."""
    check_tp(tp, int(os.environ.get("WORLD_SIZE", "1")))
    engines: list[Any] = []

    def scheduled_initialize(*args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(_INITIALIZE_ARGUMENTS, args, strict=False))
        if isinstance(kwargs.get("model"), PipelineModule):
            raise TypeError("the script makes a PipelineModule itself, which a schedule cannot split further")
        # accelerate computes train_batch_size over all ranks
        from_accelerate = sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate.")
        options = schedule_options(schedule_args)
        made = initialize(**kwargs, schedule=schedule, schedule_args=options, tp=tp, world_batches=from_accelerate)
        engines.append(made[0])
        return made

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(deepspeed, "initialize", scheduled_initialize))
        stack.enter_context(mock.patch.object(DistributedSampler, "__init__", _sampler_over_dp(tp)))
        if importlib.util.find_spec("accelerate"):
            stack.enter_context(_accelerate_over_dp(tp))
        yield engines


def _sampler_over_dp(tp: int) -> Any:
    """``DistributedSampler`` whose world is the data-parallel ranks, also where the script says the world itself."""
    untouched = DistributedSampler.__init__

    @functools.wraps(untouched)
    def over_dp(self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *args: Any, **kwargs: Any) -> None:
        world = dist.get_world_size()
        mesh = Mesh(dp=check_tp(tp, world), tp=tp, rank=dist.get_rank())
        if num_replicas in (None, world) and rank in (None, mesh.rank):
            num_replicas, rank = mesh.dp, mesh.dp_rank
        untouched(self, dataset, num_replicas, rank, *args, **kwargs)

    return over_dp


@contextmanager
def _accelerate_over_dp(tp: int) -> Iterator[None]:
    """accelerate, and with it transformers' Trainer: batches split over dp, whole weights when it saves."""
    from accelerate import Accelerator

    prepare, state_dict = Accelerator.prepare_data_loader, Accelerator.get_state_dict

    @functools.wraps(prepare)
    def prepare_over_dp(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self.state, "ds_device_mesh") and dist.is_initialized():
            self.state.ds_device_mesh = _device_mesh(tp)
        return prepare(self, *args, **kwargs)

    @functools.wraps(state_dict)
    def whole_state_dict(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return consolidate(model) if hasattr(model, "scheduled") else state_dict(self, model, *args, **kwargs)

    with (
        mock.patch.object(Accelerator, "prepare_data_loader", prepare_over_dp),
        mock.patch.object(Accelerator, "get_state_dict", whole_state_dict),
    ):
        yield


def _device_mesh(tp: int) -> Any:
    """(dp, tp) as accelerate reads it: ranks of the same dp coordinate get the same batch."""
    from torch.distributed.device_mesh import init_device_mesh

    accelerator = torch.accelerator.current_accelerator()
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
