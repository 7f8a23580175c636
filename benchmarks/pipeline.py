"""python benchmarks/pipeline.py --json pipeline.json

One training step (four micro-batches and an SGD step) of transformers' Llama at pp 2: by Partbook on DeepSpeed and on
torch's pipelining, with automatic cuts and with even ones; by a DeepSpeed PipelineModule written by hand; and by
torch's own ``pipeline()``. All start from the same weights and see the same batches. A system whose losses are not
those of one process, in the first step or after all of them, is flagged.
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
from harness import RankFailed, Record, System, measure, rank_environment
from pipeline_systems import SYSTEMS, PipelineJob
from rich.console import Console
from rich.table import Table
from systems import DTYPES, save_model

# the largest difference of a loss from one process that the rounding of the dtype explains
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-2}
SIZES = {
    "hidden": 512, "layers": 8, "heads": 8, "ffn": 1376, "vocab": 8192, "batch": 4, "sequence": 256,
    "micro_batches": 4,
}  # fmt: skip
TITLES = {
    "eager": "one process, untouched",
    "deepspeed": "DeepSpeed PipelineModule by hand",
    "torch": "torch pipeline()",
    "partbook-deepspeed": "Partbook on DeepSpeed, automatic cut",
    "partbook-deepspeed-even": "Partbook on DeepSpeed, even cut",
    "partbook-torch": "Partbook on torch pipelining, automatic cut",
    "partbook-torch-even": "Partbook on torch pipelining, even cut",
}


def table(
    what: str, dtype: str, records: Mapping[str, Record], systems: Mapping[str, System], titles: Mapping[str, str]
) -> Table:
    """One line a system; ratios are to the fastest peer (below 1 is faster)."""
    shown = Table(title=f"{what}, {dtype}, 4 micro-batches, forward + backward + step")
    columns = ("wall ms", "best", "cpu ms max", "mean", "vs peer: wall", "best", "cpu", "sent KiB", "messages")
    shown.add_column("system")
    for column in (*columns, "first loss", "difference", "last"):
        shown.add_column(column, justify="right")
    peers = [record for name, record in records.items() if systems[name].peer]
    fastest = {
        what: min((getattr(record, what) for record in peers), default=float("nan"))
        for what in ("wall", "best_wall", "cpu")
    }
    for name, record in records.items():
        first, last = differences(record, records.get("eager"))
        sent = [ready.extra for ready in record.ready]
        shown.add_row(
            titles[name],
            f"{record.wall * 1e3:.0f}",
            f"{record.best_wall * 1e3:.0f}",
            f"{record.cpu * 1e3:.0f}",
            f"{record.cpu_mean * 1e3:.0f}",
            *(f"{getattr(record, what) / fastest[what]:.3f}" for what in ("wall", "best_wall", "cpu")),
            " + ".join(f"{extra.get('bytes', 0) / 1024:.0f}" for extra in sent),
            " + ".join(str(extra.get("messages", 0)) for extra in sent),
            f"{record.ready[0].loss:.5f}",
            _judged(first, TOLERANCES[dtype]),
            _judged(last, TOLERANCES[dtype]),
        )
    return shown


def differences(record: Record, reference: Record | None) -> tuple[float | None, float | None]:
    """Of the first loss, and of the loss after all steps, from those of one process; None: not known."""
    if reference is None:
        return None, None
    first = max(abs(ready.loss - reference.ready[0].loss) for ready in record.ready)
    last = max(abs(sample.loss - reference.samples[-1][0].loss) for sample in record.samples[-1])
    return first, last


def _judged(difference: float | None, limit: float) -> str:
    if difference is None:
        return "-"
    return f"{difference:.1e}" if difference <= limit else f"[bold red]{difference:.1e} WRONG[/]"


def as_json(records: Mapping[str, Record]) -> dict[str, Any]:
    """The raw numbers, in seconds and bytes."""
    return {
        name: {
            "wall": record.wall,
            "best_wall": record.best_wall,
            "cpu_max": record.cpu,
            "cpu_mean": record.cpu_mean,
            "sent": [ready.extra for ready in record.ready],
            "first_loss": [ready.loss for ready in record.ready],
            "differences": differences(record, records.get("eager")),
            "samples": [[dataclasses.asdict(sample) for sample in ranks] for ranks in record.samples],
        }
        for name, record in records.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system (median is reported)")
    for size, default in SIZES.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    console = Console(width=190)
    deadline = time.monotonic() + options.timeout
    raw: dict[str, Any] = {"options": vars(options), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        with rank_environment():
            save_model(folder, options)
        for dtype in options.dtype:
            job = PipelineJob(
                folder=folder, dtype=dtype, batch=options.batch, sequence=options.sequence, tp=1,
                micro_batches=options.micro_batches,
            )  # fmt: skip
            load = os.getloadavg()[0]
            measured = measure([SYSTEMS[name] for name in options.systems], job, options.rounds, deadline)
            records = {name: record for (name, _), record in measured.items()}
            console.print(table("Llama, pp 2", dtype, records, SYSTEMS, TITLES))
            console.print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; 1 thread a rank\n")
            raw[dtype] = as_json(records)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(str(failure))
