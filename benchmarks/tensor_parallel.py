"""python benchmarks/tensor_parallel.py --json tensor_parallel.json

One training step (forward, loss, backward) of transformers' Llama at tp 2, by Partbook and by the other ways to
split an unmodified model: transformers' own plan, torch's ``parallelize_module`` and DeepSpeed's AutoTP. All start from
the same weights and see the same batch. A system whose first loss or gradient is not that of one process is flagged.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness import RankFailed, Record, System, Trial, measure, rank_environment
from rich.console import Console
from rich.table import Table
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# largest difference from one process that the rounding of the dtype explains: of the loss, of the gradient (relative)
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 5e-2)}
SIZES = {"hidden": 512, "layers": 8, "heads": 8, "ffn": 1376, "vocab": 8192, "batch": 4, "sequence": 256}
MAX_OVERHEAD = 0.01


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


def torch_compiled(job: Job) -> Mapping[str, Trial]:
    return _torch(job, vocabulary=True, compiled=True)


def torch_sequence(job: Job) -> Mapping[str, Trial]:
    return _torch(job, vocabulary=True, sequence=True)


def _torch(job: Job, vocabulary: bool = False, sequence: bool = False, compiled: bool = False) -> Mapping[str, Trial]:
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
    run = torch.compile(model, dynamic=False) if compiled else model

    ids = job.ids(model.config.vocab_size)
    positions = torch.arange(job.sequence).expand(job.batch, -1)

    def step() -> torch.Tensor:
        if not vocabulary:
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss
        with loss_parallel():
            loss = run(input_ids=ids, labels=ids, position_ids=positions).loss
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


def partbook(job: Job) -> Mapping[str, Trial]:
    return _partbook(job)


def partbook_compiled(job: Job) -> Mapping[str, Trial]:
    return _partbook(job, compiled=True)


def _partbook(job: Job, compiled: bool = False) -> Mapping[str, Trial]:
    from partbook.core import apply_schedule, build, create_schedule
    from partbook.dialects.pytorch import make_mesh

    schedule = create_schedule(job.model(), make_mesh(tp=job.tp))
    apply_schedule(schedule, "llama", {"fuse_qkv": True})
    return {"step": job.trial(build(schedule).model, compiled)}


def partbook_deepspeed(job: Job) -> Mapping[str, Trial]:
    _without_jit()
    from partbook.dialects.deepspeed import initialize

    options = {"fuse_qkv": True}
    engine, *_ = initialize(model=job.model(), schedule="llama", schedule_args=options, tp=job.tp, config=_config(job))
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
        System("torch-compiled", 2, torch_compiled),
        System("partbook", 2, partbook),
        System("partbook-deepspeed", 2, partbook_deepspeed),
        System("partbook-compiled", 2, partbook_compiled),
    )
}
# not one of the rounds: it alternates with the untouched model in one process, many times
EMPTY = System("partbook-empty", 1, partbook_empty)
TITLES = {
    "eager": "one process, untouched",
    "transformers": 'transformers tp_plan="auto"',
    "torch": "torch parallelize_module, layers",
    "torch-vocab": "torch, layers + vocabulary",
    "torch-sequence": "torch, layers + vocabulary + sequence",
    "autotp": "DeepSpeed AutoTP",
    "autotp-best": "DeepSpeed AutoTP, split head, no engine",
    "torch-compiled": "torch, layers + vocabulary, torch.compile",
    "partbook": "Partbook on PyTorch",
    "partbook-deepspeed": "Partbook on DeepSpeed",
    "partbook-compiled": "Partbook on PyTorch, torch.compile",
}


def overhead(record: Mapping[tuple[str, str], Record]) -> tuple[float, float, float]:
    """Relative CPU time of the empty schedule over the untouched model: median of the pairs, and its 95 % interval."""
    pairs = zip(record[EMPTY.name, "untouched"].samples, record[EMPTY.name, "empty"].samples, strict=True)
    ratios = [empty[0].cpu / untouched[0].cpu - 1 for untouched, empty in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def table(dtype: str, records: Mapping[str, Record]) -> Table:
    """One line a system; differences are to eager, ratios to the fastest peer (below 1 is faster)."""
    shown = Table(title=f"Llama, tp 2, {dtype}, forward + backward")
    for column in ("system", "wall ms", "best", "cpu ms max", "mean", "vs peer: wall", "cpu", "tensors MiB", "rss MiB"):
        shown.add_column(column, justify="left" if column == "system" else "right")
    for column in ("first loss", "difference", "gradient"):
        shown.add_column(column, justify="right")
    peers = [record for name, record in records.items() if SYSTEMS[name].peer]
    best_wall = min((record.wall for record in peers), default=0.0)
    best_cpu = min((record.cpu for record in peers), default=0.0)
    for name, record in records.items():
        loss, gradient = differences(record, records.get("eager"))
        limits = TOLERANCES[dtype]
        shown.add_row(
            TITLES[name],
            f"{record.wall * 1e3:.0f}",
            f"{record.best_wall * 1e3:.0f}",
            f"{record.cpu * 1e3:.0f}",
            f"{record.cpu_mean * 1e3:.0f}",
            f"{record.wall / best_wall:.3f}" if peers else "-",
            f"{record.cpu / best_cpu:.3f}" if peers else "-",
            f"{max(ready.tensors for ready in record.ready) / 2**20:.0f}",
            f"{max(ready.resident for ready in record.ready) / 2**20:.0f}",
            f"{record.ready[0].loss:.5f}",
            _judged(loss, limits[0]),
            _judged(gradient, limits[1]),
        )
    return shown


def differences(record: Record, reference: Record | None) -> tuple[float | None, float | None]:
    """Largest over ranks and rounds: of the loss, and of the witness gradient relative to its norm. None: not known."""
    if reference is None:
        return None, None
    # a tensor's max keeps a nan
    losses = [ready.loss for ready in record.ready] + [sample.loss for ranks in record.samples for sample in ranks]
    loss = float((torch.tensor(losses) - reference.ready[0].loss).abs().max())
    expected = reference.ready[0].gradient
    gradients = [ready.gradient for ready in record.ready if ready.gradient is not None]
    if expected is None or len(gradients) < len(record.ready):
        return loss, None
    return loss, float(torch.stack([(gradient - expected).norm() / expected.norm() for gradient in gradients]).max())


def _judged(difference: float | None, limit: float) -> str:
    if difference is None:
        return "-"
    return f"{difference:.1e}" if difference <= limit else f"[bold red]{difference:.1e} WRONG[/]"


def as_json(records: Mapping[Any, Record], reference: Record | None) -> dict[str, Any]:
    """The raw numbers, in seconds and bytes."""
    return {
        key if isinstance(key, str) else key[1]: {
            "wall": record.wall,
            "best_wall": record.best_wall,
            "cpu_max": record.cpu,
            "cpu_mean": record.cpu_mean,
            "tensor_bytes": [ready.tensors for ready in record.ready],
            "resident_bytes": [ready.resident for ready in record.ready],
            "first_loss": [ready.loss for ready in record.ready],
            "differences": differences(record, reference),
            "samples": [[dataclasses.asdict(sample) for sample in ranks] for ranks in record.samples],
        }
        for key, record in records.items()
    }


def parse() -> argparse.Namespace:
    names = [*SYSTEMS, EMPTY.name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system (median is reported)")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of steps for the overhead of an empty schedule")
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    console = Console(width=170)
    deadline = time.monotonic() + options.timeout
    chosen = [SYSTEMS[name] for name in options.systems if name in SYSTEMS]
    raw: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "load": [os.getloadavg()]}
    with tempfile.TemporaryDirectory() as folder:
        with rank_environment():
            save_model(folder, options)
        for dtype in options.dtype:
            job = Job(folder=folder, dtype=dtype, batch=options.batch, sequence=options.sequence, tp=2)
            load = os.getloadavg()[0]
            measured = measure(chosen, job, options.rounds, deadline)
            records = {name: record for (name, _), record in measured.items()}
            if records:
                console.print(table(dtype, records))
            raw[dtype] = as_json(records, records.get("eager"))
            if EMPTY.name in options.systems:
                # A short step: what a schedule adds it adds to each call, which weighs most here, and the steps of a
                # pair are close enough in time to meet the same load.
                short = dataclasses.replace(job, batch=1, sequence=max(options.sequence // 4, 1))
                pair = measure([EMPTY], short, options.pairs, deadline)
                median, low, high = overhead(pair)
                raw[dtype]["empty"] = as_json(pair, pair[EMPTY.name, "untouched"]) | {"overhead": [median, low, high]}
                verdict = (
                    "within" if high <= MAX_OVERHEAD else "ABOVE" if low > MAX_OVERHEAD else "too noisy to tell from"
                )
                console.print(
                    f"empty schedule, one process, {dtype}: {median:+.2%} CPU time over the untouched model "
                    f"(95 % interval {low:+.2%} to {high:+.2%}, {options.pairs} pairs of short steps), "
                    f"{verdict} {MAX_OVERHEAD:.0%}"
                )
            raw["load"].append(os.getloadavg())
            console.print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; 1 thread a rank\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(str(failure))
