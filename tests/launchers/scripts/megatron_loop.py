"""A trainer on megatron-core alone, as Megatron-LM's are: its groups, a provider, its schedule, its optimizer."""

import argparse
import functools

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig, AutoModelForCausalLM

from partbook.dialects.megatron import add_schedule_arguments, model_provider, save_pretrained, schedule_options


def mean(loss_mask, losses):
    total, count = (losses * loss_mask).sum(), loss_mask.sum().int()
    return total, count, {"loss": (total / count).detach()}


def forward_step(data, model):
    ids = next(data)
    labels = torch.roll(ids, -1, dims=1)
    loss_mask = torch.ones_like(ids, dtype=torch.float32)
    loss_mask[:, -1] = 0
    # As Megatron's loaders have it: ids for the first stage, labels for the last.
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    losses = model(ids if first else None, None, None, labels=labels if last else None)
    return losses, functools.partial(mean, loss_mask)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-model")
    parser.add_argument("--export")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    args = add_schedule_arguments(parser, sizes=False).parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(1)

    def build_model():
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf_model))

    provider = model_provider(
        build_model, args.schedule, schedule_options(args.schedule_arg), cuts=args.cuts, weights=args.hf_model
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = provider(pre_process=first, post_process=last)
    model.config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.1, sgd_momentum=0.0, weight_decay=0.0), [chunk]
    )
    vocabulary = AutoConfig.from_pretrained(args.hf_model).vocab_size
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        batches = [torch.randint(vocabulary, (2, 12), generator=random) for _ in range(4)]
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[chunk], num_microbatches=4,
            seq_length=12, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        if last and parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"loss of step {step}: {float(sum(report['loss'] for report in reports) / 4):.5f}", flush=True)
    save_pretrained(chunk, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
