"""The systems that ``megatron.py`` measures: megatron-core's GPTModel, and transformers' Llama behind our provider."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import System, Trial
from pipeline_systems import LEARNING_RATE, PipelineJob, Sent, sgd
from systems import DTYPES
from torch import Tensor, nn

# What a process of the benchmark runs inside, until it ends.
_inside = contextlib.ExitStack()


@dataclass(frozen=True, kw_only=True)
class MegatronJob(PipelineJob):
    """``tp`` x ``pp`` ranks; ``options`` are those of our schedule."""

    options: tuple[tuple[str, Any], ...] = ()


def eager(job: MegatronJob) -> Mapping[str, Trial]:
    """One process, as the losses of the others must be."""
    model = job.model()
    optimizer, batches = sgd(model.parameters()), job.batches()

    def step() -> Tensor:
        total = torch.zeros(())
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
            total += loss.detach().float()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return {"step": Trial(model, step, lambda: None)}


def partbook(job: MegatronJob) -> Mapping[str, Trial]:
    _start(job)
    from transformers import AutoConfig, AutoModelForCausalLM

    from partbook.dialects.megatron import model_provider

    def build() -> nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder))

    provider = model_provider(
        build, "llama", dict(job.options), weights=job.folder, config={"bf16": job.dtype == "bf16"}
    )
    stage = provider(*_place())
    return _trained(job, stage, lambda model, ids, labels: model(ids, labels=labels))


def megatron(job: MegatronJob) -> Mapping[str, Trial]:
    """GPTModel of the same shape and weights: megatron-core's layers for plain torch, fused as Megatron-LM has them."""
    _start(job)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from partbook.dialects.megatron import transformer_config

    dense: Any = job.model()
    shape = dense.config
    config = transformer_config(
        shape, bf16=job.dtype == "bf16", gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
        activation_func=nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        bias_activation_fusion=True, bias_dropout_fusion=True,
    )  # fmt: skip
    first, last = _place()
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=shape.vocab_size,
        max_sequence_length=job.sequence, position_embedding_type="rope", share_embeddings_and_output_weights=False,
        pre_process=first, post_process=last,
    )  # fmt: skip
    model.model_type, model.vp_stage = None, None
    _copy_weights(model, dense, job.tp)
    length = job.sequence
    positions = torch.arange(length).expand(job.batch, -1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return _trained(job, model, lambda chunk, ids, labels: chunk(ids, positions, mask, labels=labels))


def _copy_weights(model: Any, dense: Any, tp: int) -> None:
    """transformers' weights in the order of Megatron's fused projections, with one query to each key."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    part: Callable[[Tensor, int], Tensor] = lambda weight, dim: weight.chunk(tp, dim)[rank]  # noqa: E731
    heads = dense.config.num_attention_heads
    with torch.no_grad():
        if model.pre_process:
            model.embedding.word_embeddings.weight.copy_(part(dense.model.embed_tokens.weight, 0))
        for layer in model.decoder.layers:
            source = dense.model.layers[layer.layer_number - 1]
            attention = source.self_attn
            qkv = [getattr(attention, f"{name}_proj").weight.unflatten(0, (heads, -1)) for name in "qkv"]
            layer.self_attention.linear_qkv.weight.copy_(part(torch.cat(qkv, 1).flatten(0, 1), 0))
            layer.self_attention.linear_proj.weight.copy_(part(attention.o_proj.weight, 1))
            gate_up = [part(source.mlp.gate_proj.weight, 0), part(source.mlp.up_proj.weight, 0)]
            layer.mlp.linear_fc1.weight.copy_(torch.cat(gate_up))
            layer.mlp.linear_fc2.weight.copy_(part(source.mlp.down_proj.weight, 1))
            layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
            layer.pre_mlp_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        if model.post_process:
            model.decoder.final_layernorm.weight.copy_(dense.model.norm.weight)
            model.output_layer.weight.copy_(part(dense.lm_head.weight, 0))


def _start(job: MegatronJob) -> None:
    # Where the script lies, there is a megatron.py, which would be taken for the package.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from partbook.dialects.megatron import on_cpu

    _inside.enter_context(on_cpu())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=job.tp, pipeline_model_parallel_size=job.pp)
    model_parallel_cuda_manual_seed(1)


def _place() -> tuple[bool, bool]:
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()


def _trained(job: MegatronJob, model: Any, call: Callable[[Any, Tensor, Tensor], Tensor]) -> Mapping[str, Trial]:
    """Megatron's own schedule, DDP and SGD around either model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    config, is_narrow = model.config, job.dtype == "bf16"
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = Float16Module(config, model) if is_narrow else model
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), wrapped)
    settings = OptimizerConfig(
        optimizer="sgd", lr=LEARNING_RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, bf16=is_narrow,
        params_dtype=DTYPES[job.dtype],
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [chunk])
    config.grad_scale_func = optimizer.scale_loss
    sent, run = Sent(), get_forward_backward_func()
    batches = [(ids, nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()) for ids in job.batches()]

    def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        ids, labels = next(data)
        # A label that does not count: GPTModel takes real ids only, and leaves the mask to the loss function.
        return call(model, ids, labels.clamp(min=0)), functools.partial(_mean, labels)

    def step() -> Tensor:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        before = (sent.bytes, sent.messages)
        reports = run(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[chunk],
            num_microbatches=job.micro_batches, seq_length=job.sequence, micro_batch_size=job.batch, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        trial.extra.update(bytes=sent.bytes - before[0], messages=sent.messages - before[1])
        loss = torch.stack([report["loss"] for report in reports]).mean() if reports else torch.zeros(())
        dist.broadcast(loss, src=dist.get_world_size() - 1)
        return loss

    trial = Trial(chunk, step, lambda: None)
    return {"step": trial}


def _mean(labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    counted = labels != -100
    total, count = (losses.float() * counted).sum(), counted.sum().int()
    return total, count, {"loss": (total / count).detach()}


SYSTEMS = {
    system.name: system
    for system in [
        System("eager", 1, eager),
        System("megatron", 2, megatron, peer=True),
        System("partbook", 2, partbook),
    ]
}
