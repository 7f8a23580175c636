"""The systems that ``tensor_parallel.py`` measures: one function each makes a model ready and gives its step."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness import System, Trial
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """``folder`` holds the initial weights as transformers saves them; the batch follows from the sizes."""

    folder: str
    dtype: str
    batch: int
    sequence: int
    tp: int

    def model(self, **options: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=DTYPES[self.dtype], **options).train()

    def trial(self, model: nn.Module, compiled: bool = False) -> Trial:
        """Forward with labels and a plain backward."""
        ids = self.ids(model.config.vocab_size)
        run = torch.compile(model, dynamic=False) if compiled else model

        def step() -> torch.Tensor:
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        return Trial(model, step, lambda: witness(model).grad)

    def ids(self, vocabulary: int) -> torch.Tensor:
        return torch.randint(vocabulary, (self.batch, self.sequence), generator=torch.Generator().manual_seed(1))


def witness(model: nn.Module) -> nn.Parameter:
    """The weight of the first norm: no system splits it, and only a right backward of all layers gives its gradient."""
    (found,) = (p for name, p in model.named_parameters() if name.endswith("layers.0.input_layernorm.weight"))
    return found


def save_model(folder: str, options: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.ffn,
        vocab_size=options.vocab,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=False,
        use_cache=False,  # nobody trains with a key-value cache
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def eager(job: Job) -> Mapping[str, Trial]:
    return {"step": job.trial(job.model())}


def transformers_plan(job: Job) -> Mapping[str, Trial]:
    return {"step": job.trial(job.model(tp_plan="auto"))}


def torch_layers(job: Job) -> Mapping[str, Trial]:
    return _torch(job)


def torch_vocabulary(job: Job) -> Mapping[str, Trial]:
    return _torch(job, vocabulary=True)


def torch_sequence(job: Job) -> Mapping[str, Trial]:
    return _torch(job, vocabulary=True, sequence=True)


def _torch(job: Job, vocabulary: bool = False, sequence: bool = False) -> Mapping[str, Trial]:
    """``parallelize_module`` with one all-reduce a block and direction, as torchtitan's plan for Llama does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model = job.model()
    mesh = init_device_mesh("cpu", (job.tp,))
    # the input becomes a DTensor once a block: the gradients of q, k and v (gate and up) are summed, then reduced
    hidden = Shard(1) if sequence else Replicate()
    attention_input = {"hidden_states": hidden}
    block: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=attention_input, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": RowwiseParallel(output_layouts=hidden),
        "mlp.down_proj": RowwiseParallel(output_layouts=hidden),
    }
    block |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    block |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    if sequence:
        block |= {f"{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
    plan: dict[str, Any] = {f"model.layers.*.{path}": style for path, style in block.items()}
    if vocabulary:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)
        plan["lm_head"] = ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False)
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)
    ids = job.ids(model.config.vocab_size)
    positions = torch.arange(job.sequence).expand(job.batch, -1)

    def step() -> torch.Tensor:
        if not vocabulary:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss
        with loss_parallel():
            loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
            loss.backward()
        return loss

    return {"step": Trial(model, step, lambda: witness(model).grad)}


def autotp(job: Job) -> Mapping[str, Trial]:
    """As documented: the engine with the default options of AutoTP."""
    from deepspeed import initialize

    _without_jit()
    engine, *_ = initialize(model=job.model(), config=_config(job) | {"tensor_parallel": {"autotp_size": job.tp}})
    return {"step": _engine_trial(job, engine)}


def autotp_best(job: Job) -> Mapping[str, Trial]:
    """The fastest way to the same gradients that we found: head and loss split too, no optimizer, no engine.

    The parallel layers are the module's own, so it is called directly. ``tp_overlap_comm`` changed nothing.
    """
    from deepspeed import initialize

    _without_jit()
    config = _config(job, optimizer=False)
    config["tensor_parallel"] = {"autotp_size": job.tp, "vocab_parallel_lm_head": True}
    engine, *_ = initialize(model=job.model(), config=config)
    return {"step": job.trial(engine.module)}


def _without_jit() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce when it starts.

    Only inference calls it: in training AutoTP's layers use ``dist.all_reduce`` (module_inject/layers.py, RowParallel
    and ColumnParallel, 0.19), so this takes nothing from AutoTP but the minute of compilation.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _config(job: Job, optimizer: bool = True) -> dict[str, Any]:
    """``engine.backward`` insists on an optimizer; it never steps. ZeRO 0 is wrong for bf16, so there it is ZeRO 1."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_clipping": 0.0,
        # the default bucket is a gigabyte whatever the model
        "zero_optimization": {"stage": int(optimizer and job.dtype == "bf16"), "reduce_bucket_size": 20_000_000},
        "bf16": {"enabled": job.dtype == "bf16"},
    }
    if optimizer:
        config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_allow_untested_optimizer": True}
    return config


def _engine_trial(job: Job, engine: Any) -> Trial:
    from deepspeed.utils import safe_get_full_grad

    ids = job.ids(engine.module.config.vocab_size)

    def step() -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        return loss

    # ZeRO takes the gradients away from the parameters
    return Trial(engine.module, step, lambda: safe_get_full_grad(witness(engine.module)))


OPTIONS = {"fuse_qkv": True, "fuse_gate_up": True}


def partbook(job: Job) -> Mapping[str, Trial]:
    return _partbook(job)


def partbook_compiled(job: Job) -> Mapping[str, Trial]:
    return _partbook(job, compiled=True)


def _partbook(job: Job, compiled: bool = False) -> Mapping[str, Trial]:
    from partbook.core import apply_schedule, build, create_schedule
    from partbook.dialects.pytorch import make_mesh

    schedule = create_schedule(job.model(), make_mesh(tp=job.tp))
    apply_schedule(schedule, "llama", OPTIONS)
    return {"step": job.trial(build(schedule).model, compiled)}


def partbook_deepspeed(job: Job) -> Mapping[str, Trial]:
    _without_jit()
    from partbook.dialects.deepspeed import initialize

    engine, *_ = initialize(model=job.model(), schedule="llama", schedule_args=OPTIONS, tp=job.tp, config=_config(job))
    return {"step": _engine_trial(job, engine)}


def partbook_empty(job: Job) -> Mapping[str, Trial]:
    """An untouched model and one under a schedule of no calls, in one process and over the same memory."""
    from partbook.core import build, create_schedule

    untouched, scheduled = job.model(), build(create_schedule(job.model())).model
    theirs = dict(untouched.named_parameters())
    for name, parameter in scheduled.named_parameters():
        parameter.data = theirs[name].data
    return {"untouched": job.trial(untouched), "empty": job.trial(scheduled)}


SYSTEMS = {
    system.name: system
    for system in (
        System("eager", 1, eager),
        System("transformers", 2, transformers_plan, peer=True),
        System("torch", 2, torch_layers, peer=True),
        System("torch-vocab", 2, torch_vocabulary, peer=True),
        System("torch-sequence", 2, torch_sequence, peer=True),
        System("autotp", 2, autotp, peer=True),
        System("autotp-best", 2, autotp_best, peer=True),
        System("partbook", 2, partbook),
        System("partbook-deepspeed", 2, partbook_deepspeed),
        System("partbook-compiled", 2, partbook_compiled),
    )
}
# not one of the rounds: it alternates with the untouched model in one process, many times
EMPTY = System("partbook-empty", 1, partbook_empty)
