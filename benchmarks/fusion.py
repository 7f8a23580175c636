"""python benchmarks/fusion.py --json fusion.json

One training step (forward, loss, backward, AdamW) of a model as it is, with Partbook's fused regions, and with
``torch.compile`` of the whole model, side by side. All start from the same weights and see the same batch and the same
dropout masks, but for ``compile-own-masks``: inductor's own random numbers are other ones. A system whose first loss or
gradient is not that of the untouched model is flagged. The seconds until the second step are reported apart.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from families import DTYPES, blocks, ids, make, parts, witness
from harness import RankFailed, Record, System, Trial, measure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

# largest difference from the untouched model that the rounding of the dtype explains: of the loss, of the gradient
# (relative)
TOLERANCES = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1)}
TITLES = {
    "eager": "untouched",
    "partbook": "Partbook, fused regions",
    "compile": "torch.compile, same masks",
    "compile-own-masks": "torch.compile, its own masks",
}


@dataclasses.dataclass(frozen=True)
class Job:
    model: str
    dtype: str
    batch: int
    sequence: int
    # where inductor keeps what it has compiled: empty at the start, so that each system compiles everything
    cache: str

    def trial(self, model: nn.Module, run: Callable[..., Any]) -> Trial:
        batch = ids(model, self.batch, self.sequence)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> Tensor:
            torch.manual_seed(0)
            loss = run(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            return loss

        return Trial(model, step, lambda: witness(model).grad)

    def own_cache(self, system: str) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(self.cache, system)


def eager(job: Job) -> Mapping[str, Trial]:
    model = make(job.model, job.dtype)
    return {"step": job.trial(model, model)}


def compiled(job: Job) -> Mapping[str, Trial]:
    return _compiled(job, same_masks=True)


def compiled_own_masks(job: Job) -> Mapping[str, Trial]:
    return _compiled(job, same_masks=False)


def _compiled(job: Job, same_masks: bool) -> Mapping[str, Trial]:
    job.own_cache(f"compile-{same_masks}")
    model = make(job.model, job.dtype)
    return {"step": job.trial(model, torch.compile(model, dynamic=False, options={"fallback_random": same_masks}))}


def partbook(job: Job) -> Mapping[str, Trial]:
    from partbook.core import build, create_schedule

    job.own_cache("partbook")
    schedule = create_schedule(make(job.model, job.dtype))
    SCHEDULES[job.model](schedule, job)
    model = build(schedule).model
    return {"step": job.trial(model, model)}


# ---------------------------------------------------------------------- what is fused


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def gate_and_up(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    y = x.to(torch.float32)
    variance = y.pow(2).mean(-1, keepdim=True)
    return weight * (y * torch.rsqrt(variance + epsilon)).to(dtype)


def residual_and_norm(x: Tensor, residual: Tensor) -> Any:
    from partbook.core.patterns import module

    y = residual + x
    return y, module("post_attention_layernorm")(y)


def fuse_llama(schedule: Any, job: Job) -> None:
    for path in blocks(job.model, schedule.module):
        block = schedule[path]
        places = [(block["self_attn"], rotary), (block["mlp"], gate_and_up)]
        for node, pattern in (*places, (block, residual_and_norm), (block["input_layernorm"], rms_norm)):
            node.fuse(node.match(pattern))
    schedule["model.norm"].fuse(schedule["model.norm"].match(rms_norm))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    from partbook.core.patterns import module

    return module("intermediate_act_fn")(x + bias)


def bias_dropout_residual_norm(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    from partbook.core.patterns import module

    return module("LayerNorm")(module("dropout")(x + bias) + residual)


def fuse_bert(schedule: Any, job: Job) -> None:
    for path in blocks(job.model, schedule.module):
        places = {
            "intermediate": bias_gelu,
            "attention.output": bias_dropout_residual_norm,
            "output": bias_dropout_residual_norm,
        }
        for name, pattern in places.items():
            node = schedule[f"{path}.{name}"]
            node["dense"].decompose()
            node.fuse(node.match(pattern))


def bias_act(x: Tensor, bias: Tensor) -> Tensor:
    from partbook.core.patterns import module

    return module("act")(x + bias)


def bias_dropout(x: Tensor, bias: Tensor) -> Tensor:
    from partbook.core.patterns import module

    return module("*dropout")(x + bias)


def residual_and_second_norm(x: Tensor, residual: Tensor) -> Any:
    from partbook.core.patterns import module

    y = x + residual
    return y, module("ln_2")(y)


def fuse_gpt2(schedule: Any, job: Job) -> None:
    for path in parts(job.model, schedule.module):
        node = schedule[path]
        node["c_proj"].decompose()
        if path.endswith("mlp"):
            node["c_fc"].decompose()
            node.fuse(node.match(bias_act))
        node.fuse(node.match(bias_dropout))
    for path in blocks(job.model, schedule.module):
        schedule[path].fuse(schedule[path].match(residual_and_second_norm))


SCHEDULES = {"llama": fuse_llama, "bert": fuse_bert, "gpt2": fuse_gpt2}
SYSTEMS = {
    system.name: system
    for system in (
        System("eager", 1, eager),
        System("partbook", 1, partbook),
        System("compile", 1, compiled, peer=True),
        System("compile-own-masks", 1, compiled_own_masks, peer=True),
    )
}


# ---------------------------------------------------------------------- the report


def table(job: Job, records: Mapping[str, Record]) -> Table:
    """One line a system; ratios are to the untouched model (below 1 is faster)."""
    shown = Table(title=f"{job.model}, {job.dtype}, {job.batch} x {job.sequence} tokens, forward + backward + AdamW")
    shown.add_column("system")
    columns = (
        "wall ms",
        "best",
        "cpu ms",
        "to eager: wall",
        "cpu",
        "build s",
        "first step s",
        "tensors MiB",
        "rss MiB",
    )
    for column in (*columns, "first loss", "difference", "gradient"):
        shown.add_column(column, justify="right")
    reference = records.get("eager")
    for name, record in records.items():
        ready = record.ready[0]
        loss, gradient = differences(record, reference) if name != "compile-own-masks" else (None, None)
        shown.add_row(
            TITLES[name],
            f"{record.wall * 1e3:.0f}",
            f"{record.best_wall * 1e3:.0f}",
            f"{record.cpu * 1e3:.0f}",
            f"{record.wall / reference.wall:.3f}" if reference else "-",
            f"{record.cpu / reference.cpu:.3f}" if reference else "-",
            f"{ready.built:.1f}",
            f"{ready.first.wall:.1f}",
            f"{ready.tensors / 2**20:.0f}",
            f"{ready.resident / 2**20:.0f}",
            f"{ready.loss:.5f}",
            _judged(loss, TOLERANCES[job.dtype][0]),
            _judged(gradient, TOLERANCES[job.dtype][1]),
        )
    return shown


def differences(record: Record, reference: Record | None) -> tuple[float | None, float | None]:
    """Of the first loss, and of the first gradient of the witness relative to its norm. None: not known."""
    if reference is None:
        return None, None
    ours, theirs = record.ready[0], reference.ready[0]
    assert ours.gradient is not None
    assert theirs.gradient is not None
    gradient = (ours.gradient - theirs.gradient).norm() / theirs.gradient.norm()
    return abs(ours.loss - theirs.loss), float(gradient)


def _judged(difference: float | None, limit: float) -> str:
    if difference is None:
        return "-"
    return f"{difference:.1e}" if difference <= limit else f"[bold red]{difference:.1e} WRONG[/]"


def as_json(records: Mapping[str, Record]) -> dict[str, Any]:
    """The raw numbers, in seconds and bytes."""
    return {
        name: {
            "built": record.ready[0].built,
            "first_step": dataclasses.asdict(record.ready[0].first),
            "tensor_bytes": record.ready[0].tensors,
            "resident_bytes": record.ready[0].resident,
            "samples": [dataclasses.asdict(ranks[0]) for ranks in record.samples],
        }
        for name, record in records.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system (median is reported)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    console = Console(width=170)
    deadline = time.monotonic() + options.timeout
    raw: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "load": [os.getloadavg()]}
    for name in options.models:
        for dtype in options.dtype:
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as folder:
                job = Job(name, dtype, options.batch, options.sequence, folder)
                # Llama has no dropout: nothing to draw
                left_out = {"compile-own-masks"} if name == "llama" else set()
                chosen = [SYSTEMS[system] for system in options.systems if system not in left_out]
                measured = measure(chosen, job, options.rounds, deadline)
            records = {system: record for (system, _), record in measured.items()}
            console.print(table(job, records))
            console.print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; 1 thread\n")
            raw[f"{name} {dtype}"] = as_json(records)
            raw["load"].append(os.getloadavg())
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(str(failure))
