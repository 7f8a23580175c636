"""What an unedited script meets under the launcher: a scheduled ``deepspeed.initialize``, data split over dp."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data.distributed import DistributedSampler

from partbook.core import Mesh, PartbookError
from partbook.core.registry import ModelSchedule
from partbook.dialects.cuts import AUTO
from partbook.dialects.deepspeed import consolidate, initialize, save_pretrained
from partbook.dialects.deepspeed.adapter import skip_compiling_on_cpu
from partbook.dialects.ranks import check_sizes


@contextmanager
def intercept(
    schedule: ModelSchedule,
    options: dict[str, str],
    tp: int,
    export: str | None = None,
    *,
    pp: int = 1,
    cuts: str = AUTO,
) -> Iterator[None]:
    """While the context is open, ``deepspeed.initialize`` schedules the model and samplers split data over dp.

    ``export``: a folder for the trained model, written when the context closes or the script ends its process group.
    Raises RuntimeError when no engine was made, and nothing was scheduled.
    """
    check_sizes(tp, pp, int(os.environ.get("WORLD_SIZE", tp * pp)))
    skip_compiling_on_cpu()
    engines: list[Any] = []
    folder = Path(export).resolve() if export else None
    signature = inspect.signature(deepspeed.initialize)

    @functools.wraps(deepspeed.initialize)
    def scheduled_initialize(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if isinstance(arguments.get("model"), PipelineModule):
            raise TypeError("the script makes a PipelineModule itself, which a schedule cannot split further")
        # accelerate computes train_batch_size over all ranks
        from_accelerate = sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate.")
        if from_accelerate and pp > 1:
            raise PartbookError(
                "accelerate, and with it transformers' Trainer, calls the model for each batch, which a model that is "
                f"cut into pp={pp} stages cannot do\n  hint: a loop of engine.train_batch(data_iter=...), or pp=1"
            )
        made = initialize(
            **arguments,
            schedule=schedule,
            schedule_args=options,
            tp=tp,
            pp=pp,
            cuts=cuts,
            world_batches=from_accelerate,
        )
        engines.append(made[0])
        return made

    @functools.cache
    def finish() -> None:
        if not engines:
            raise RuntimeError("the script made no engine with deepspeed.initialize, so its model was not scheduled")
        if folder is not None:
            for number, engine in enumerate(engines):
                save_pretrained(engine, folder / str(number) if len(engines) > 1 else folder)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(deepspeed, "initialize", scheduled_initialize))
        stack.enter_context(mock.patch.object(DistributedSampler, "__init__", _sampler_over_dp(tp, pp)))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group", _after(finish)))
        if importlib.util.find_spec("accelerate"):
            stack.enter_context(_accelerate_over_dp(tp))
        try:
            yield
        except SystemExit as ended:
            if ended.code:
                raise
        finish()


def _after(finish: Callable[[], None]) -> Callable[..., None]:
    """``destroy_process_group`` that first does what needs the group, unless the script is failing."""
    untouched = dist.destroy_process_group

    @functools.wraps(untouched)
    def destroy(group: Any = None) -> None:
        if group is None and sys.exc_info()[0] is None:
            finish()
        untouched(group)

    return destroy


def _sampler_over_dp(tp: int, pp: int) -> Callable[..., None]:
    """``DistributedSampler`` whose world is the data-parallel ranks, also where the script says the world itself."""
    untouched = DistributedSampler.__init__

    @functools.wraps(untouched)
    def over_dp(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        world = dist.get_world_size()
        mesh = Mesh(dp=check_sizes(tp, pp, world), pp=pp, tp=tp, rank=dist.get_rank())
        over_the_world = num_replicas in (None, world) and rank in (None, mesh.rank)
        if over_the_world or (num_replicas == mesh.dp and rank is None):
            num_replicas, rank = mesh.dp, mesh.dp_rank
        untouched(self, dataset, num_replicas, rank, *args, **kwargs)

    return over_dp


@contextmanager
def _accelerate_over_dp(tp: int) -> Iterator[None]:
    """accelerate, and with it transformers' Trainer: batches split over dp, metrics of each sample once, whole weights
    when it saves."""
    import accelerate.accelerator
    from accelerate import Accelerator, DistributedType
    from accelerate.utils.operations import recursively_apply

    prepare, gather = Accelerator.prepare_data_loader, Accelerator.gather_for_metrics
    gather_object, state_dict = accelerate.accelerator.gather_object, Accelerator.get_state_dict

    @functools.wraps(prepare)
    def prepare_over_dp(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type == DistributedType.DEEPSPEED and not hasattr(self.state, "ds_device_mesh"):
            # ranks of the same dp coordinate get the same batch
            shape = (dist.get_world_size() // tp, tp)
            self.state.ds_device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
        return prepare(self, *args, **kwargs)

    def gather_object_over_dp(data: list[Any]) -> Any:
        return gather_object([] if dist.get_rank() % tp else data)

    @functools.wraps(gather)
    def gather_over_dp(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type != DistributedType.DEEPSPEED:
            return gather(self, *args, **kwargs)
        whole = self.gather

        def gather_tensors_over_dp(data: Any) -> Any:
            # of each tp group, the first rank's
            return recursively_apply(lambda tensor: torch.cat(tensor.chunk(dist.get_world_size())[::tp]), whole(data))

        with (
            mock.patch.object(self, "gather", gather_tensors_over_dp),
            mock.patch.object(accelerate.accelerator, "gather_object", gather_object_over_dp),
        ):
            return gather(self, *args, **kwargs)

    @functools.wraps(state_dict)
    def whole_state_dict(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return consolidate(model) if hasattr(model, "scheduled") else state_dict(self, model, *args, **kwargs)

    with (
        mock.patch.object(Accelerator, "prepare_data_loader", prepare_over_dp),
        mock.patch.object(Accelerator, "gather_for_metrics", gather_over_dp),
        mock.patch.object(Accelerator, "get_state_dict", whole_state_dict),
    ):
        yield
