"""python benchmarks/tensor_parallel.py --json tensor_parallel.json

One training step (forward, loss, backward) of transformers' Llama at tp 2, by Partbook and by the other ways to
split an unmodified model: transformers' own plan, torch's ``parallelize_module`` and DeepSpeed's AutoTP. All start from
the same weights and see the same batch. A system whose first loss or gradient is not that of one process is flagged.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from harness import RankFailed, Record, measure, overhead, rank_environment
from rich.console import Console
from rich.table import Table
from systems import DTYPES, EMPTY, SYSTEMS, Job, save_model

# largest difference from one process that the rounding of the dtype explains: of the loss, of the gradient (relative)
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 5e-2)}
SIZES = {"hidden": 512, "layers": 8, "heads": 8, "ffn": 1376, "vocab": 8192, "batch": 4, "sequence": 256}
MAX_OVERHEAD = 0.01


TITLES = {
    "eager": "one process, untouched",
    "transformers": 'transformers tp_plan="auto"',
    "torch": "torch parallelize_module, layers",
    "torch-vocab": "torch, layers + vocabulary",
    "torch-sequence": "torch, layers + vocabulary + sequence",
    "autotp": "DeepSpeed AutoTP",
    "autotp-best": "DeepSpeed AutoTP, split head, no engine",
    "partbook": "Partbook on PyTorch",
    "partbook-deepspeed": "Partbook on DeepSpeed",
    "partbook-compiled": "Partbook on PyTorch, torch.compile",
}


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
                median, low, high = overhead(pair[EMPTY.name, "untouched"], pair[EMPTY.name, "empty"])
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
