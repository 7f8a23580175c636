"""python benchmarks/megatron.py --json megatron.json

One training step (four micro-batches, finalised gradients and an SGD step) at tp 2 and at pp 2, under megatron-core's
schedules, DDP and optimizer: of its own GPTModel, and of transformers' Llama behind Partbook's model provider. Both
have the same weights and see the same batches. A system whose losses are not those of one untouched process, in the
first step or after all of them, is flagged.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
from harness import RankFailed, measure, rank_environment
from megatron_systems import SYSTEMS, MegatronJob
from pipeline import SIZES, as_json, table
from rich.console import Console
from systems import DTYPES, save_model

TITLES = {
    "eager": "one process, untouched",
    "megatron": "megatron-core's GPTModel",
    "partbook": "Partbook on Megatron",
}
LAYOUTS = {"tp 2": (2, 1), "pp 2": (1, 2)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--options", nargs="*", default=["fuse_qkv", "fuse_gate_up", "fuse_norm"], help="what our schedule fuses"
    )
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
        for layout in options.layouts:
            tp, pp = LAYOUTS[layout]
            for dtype in options.dtype:
                job = MegatronJob(
                    folder=folder, dtype=dtype, batch=options.batch, sequence=options.sequence, tp=tp, pp=pp,
                    micro_batches=options.micro_batches, options=tuple((name, True) for name in options.options),
                )  # fmt: skip
                load = os.getloadavg()[0]
                measured = measure([SYSTEMS[name] for name in options.systems], job, options.rounds, deadline)
                records = {name: record for (name, _), record in measured.items()}
                console.print(table(f"Llama on Megatron, {layout}", dtype, records, SYSTEMS, TITLES))
                console.print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; 1 thread a rank\n")
                raw[f"{layout} {dtype}"] = as_json(records)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(str(failure))
