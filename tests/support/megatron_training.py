"""Small models trained by megatron-core's own schedules, DDP and optimizer on gloo, from one process of each rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

import models
from partbook.dialects.megatron import StageModel, model_provider, on_cpu, scheduled_of

_stack = contextlib.ExitStack()


def start(tp: int = 1, pp: int = 1, vp: int | None = None, **options: Any) -> None:
    """Megatron's process groups in this rank's world, on the CPU, for the rest of the process."""
    _stack.enter_context(on_cpu())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        **options,
    )
    model_parallel_cuda_manual_seed(1)


@dataclass
class Training:
    """The chunks of a rank in Megatron's wrappers, their optimizer, and the schedule that runs them."""

    chunks: list[Any]
    optimizer: Any

    @property
    def scheduled(self) -> Any:
        return scheduled_of(self.chunks)

    @property
    def is_virtual(self) -> bool:
        return len(self.chunks) > 1

    def step(
        self, batches: list[dict[str, Tensor]], before: Callable[[], object] | None = None
    ) -> tuple[Tensor, float]:
        """The loss, mean over the micro-batches and dp, equal on all ranks, and the gradient norm.

        ``before`` is called when gradients are complete, before the optimizer uses them.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.run(batches)
        if before is not None:
            before()
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)

    def run(self, batches: list[dict[str, Tensor]], forward_only: bool = False) -> Tensor:
        iterators = [iter(batches) for _ in self.chunks]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if self.is_virtual else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=batches[0]["input_ids"].shape[1],
            micro_batch_size=batches[0]["input_ids"].shape[0],
            forward_only=forward_only,
        )
        found = torch.tensor([report["loss"] for report in reports]).sum() if reports else torch.zeros(())
        dist.all_reduce(found)
        return found / (len(batches) * parallel_state.get_tensor_and_data_parallel_group().size())


def forward_step(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = dict(next(iterator))
    if isinstance(unwrapped(model), GPTModel):
        batch |= megatrons_arguments(batch["input_ids"])
    labels = labels_of(batch, unwrapped(model))
    return model(**{**batch, "labels": labels}), functools.partial(mean_loss, labels)


def unwrapped(model: nn.Module) -> Any:
    while not isinstance(model, GPTModel | StageModel):
        model = model.module
    return model


def megatrons_arguments(ids: Tensor) -> dict[str, Tensor]:
    """Position ids and mask as Megatron's loaders make them."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {"position_ids": torch.arange(length).expand_as(ids), "attention_mask": mask[None, None]}


def labels_of(batch: dict[str, Tensor], model: Any) -> Tensor:
    """Labels as Megatron's datasets have them: those of a causal model are of the next token."""
    name = type(model if isinstance(model, GPTModel) else model.scheduled.original.skeleton).__name__
    if name.startswith(("T5", "Bert")):
        return batch["labels"]
    return nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()


def mean_loss(labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As Megatron-LM's loss functions: the sum, how many tokens count, and what is reported."""
    counted = labels != -100
    total, count = (losses.float() * counted).sum(), counted.sum().int()
    return total, count, {"loss": (total / count).detach()}


def provide(provider: Any, vp: int | None = None) -> list[Any]:
    """What Megatron's get_model asks a provider for."""
    if vp is None:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        return [provider(pre_process=first, post_process=last)]
    found = []
    for stage in range(vp):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        found.append(provider(pre_process=first, post_process=last, vp_stage=stage))
    return found


def wrap(
    chunks: list[Any], *, distributed: bool = False, optimizer: dict[str, Any] | None = None, **ddp: Any
) -> Training:
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **ddp)
    wrapped = [DistributedDataParallel(config, settings, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    given = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.1}
    given |= optimizer or {}
    options = OptimizerConfig(
        **given, use_distributed_optimizer=distributed, bf16=config.bf16, fp16=config.fp16,
        params_dtype=config.params_dtype,
    )  # fmt: skip
    built = get_megatron_optimizer(options, wrapped)
    config.grad_scale_func = built.scale_loss
    if settings.overlap_grad_reduce:
        # As Megatron-LM's train(): gradients are reduced with the last micro-batch.
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return Training(wrapped, built)


def train(
    family: str, dense: nn.Module, *, vp: int | None = None, options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None, cuts: Any = None, distributed: bool = False,
    optimizer: dict[str, Any] | None = None, **ddp: Any,
) -> Training:  # fmt: skip
    """A model of ``dense``'s class and weights, built on the meta device."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return type(dense)(dense.config)

    provider = model_provider(build, family, options, cuts=cuts, weights=dense, config=config or {})
    return wrap(provide(provider, vp), distributed=distributed, optimizer=optimizer, **ddp)


def batches_of(step: int, count: int = 4, dp: int = 1, padded: bool = False) -> list[list[dict[str, Tensor]]]:
    """The parts of each dp rank, for every micro-batch of a step."""
    found = []
    for number in range(count):
        whole = models.batch(size=2 * dp, length=12, seed=step * count + number, padded=padded)
        found.append([{k: v[2 * i : 2 * i + 2] for k, v in whole.items()} for i in range(dp)])
    return found
