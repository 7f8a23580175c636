"""One training, run twice: the model untouched in one process, and split over two by Partbook. The losses agree.

python examples/demo.py

Leaves in out/demo: the logs, the losses, a picture of them, and a Hugging Face folder from each run.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from bytes_gpt import ByteWindows
from progress import progress
from rich.console import Console
from rich.table import Table
from transformers import GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = Path("examples")
OUT = Path("out/demo")
CONFIG = EXAMPLES / "ds_zero1.json"
TENSOR_PARALLEL = 2
LARGEST_DIFFERENCE = 1e-3
SILENCE_SECONDS = 300  # a run without a new step for so long is stopped
TAIL_LINES = 40


class DemoError(Exception):
    """A run that failed, or results that do not agree; the text is for the user."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One of the two trainings. ``threads``: per process."""

    title: str
    name: str
    command: Sequence[str]
    processes: int
    threads: int

    @property
    def losses_file(self) -> Path:
        return OUT / f"{self.name}.jsonl"

    @property
    def log_file(self) -> Path:
        return OUT / f"{self.name}.log"

    def losses(self) -> list[float]:
        """The loss of every step so far."""
        if not self.losses_file.exists():
            return []
        lines = self.losses_file.read_text().splitlines(keepends=True)
        # the last line may be half written
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def device_type() -> str:
    """The kind of accelerator, where there is one for each rank; else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator and torch.accelerator.device_count() >= TENSOR_PARALLEL else "cpu"


def plan_runs(steps: int, device: str) -> tuple[Run, Run]:
    """The untouched run and Partbook's."""
    config = json.loads(CONFIG.read_text())
    plain = Run(
        title="untouched",
        name="untouched",
        command=[
            *(sys.executable, str(EXAMPLES / "plain.py"), "--device", device, "--steps", str(steps)),
            *("--batch_size", str(config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"])),
            *("--clip", str(config["gradient_clipping"])),
            *("--out", str(OUT / "untouched.jsonl"), "--save", str(OUT / "untouched")),
        ],
        processes=1,
        threads=TENSOR_PARALLEL,
    )
    partbook = Run(
        title=f"partbook tp={TENSOR_PARALLEL}",
        name="partbook",
        command=[
            *(sys.executable, "-m", "partbook.launchers.deepspeed"),
            *("--num_gpus", str(TENSOR_PARALLEL), "--master_port", str(free_port())),
            *("--schedule", "gpt2", "--tp", str(TENSOR_PARALLEL), "--export", str(OUT / "hf")),
            *(str(EXAMPLES / "train.py"), "--deepspeed_config", str(CONFIG), "--steps", str(steps)),
            *("--out", str(OUT / "partbook.jsonl"), "--save", str(OUT / "checkpoint")),
        ],
        processes=TENSOR_PARALLEL,
        threads=1,
    )
    return plain, partbook


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def execute(run: Run, steps: int, device: str) -> float:
    """Runs it to its end beside a progress display. Returns the seconds that it took."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(run.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu"}
    print(f"$ {shlex.join(['python', *run.command[1:]])}", flush=True)
    start = last_news = time.monotonic()
    with run.log_file.open("w") as log, progress(run.title, steps) as update:
        # in a session of its own, so that all of its processes can be ended together
        process = subprocess.Popen(
            run.command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            num_losses = 0
            update(0, "starting")
            while process.poll() is None:
                time.sleep(0.25)
                losses = run.losses()
                if len(losses) > num_losses:
                    num_losses, last_news = len(losses), time.monotonic()
                    update(num_losses, f"loss {losses[-1]:.4f}")
                elif time.monotonic() > last_news + SILENCE_SECONDS:
                    raise DemoError(f"The run '{run.title}' did nothing for {SILENCE_SECONDS} s.\n{tail(run)}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        losses = run.losses()
        if losses:
            update(len(losses), f"loss {losses[-1]:.4f}")
    if process.returncode != 0:
        raise DemoError(f"The run '{run.title}' ended with code {process.returncode}.\n{tail(run)}")
    if len(losses) != steps:
        raise DemoError(f"The run '{run.title}' wrote {len(losses)} losses instead of {steps}.\n{tail(run)}")
    return time.monotonic() - start


def tail(run: Run) -> str:
    lines = run.log_file.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"The end of {run.log_file}:", *(f"  | {line}" for line in lines)])


def load(folder: Path) -> GPT2LMHeadModel:
    """The model in a Hugging Face folder, by transformers alone."""
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    problems = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if problems:
        raise DemoError(f"{folder} does not hold exactly the weights of {type(model).__name__}: {problems}")
    return model.eval()


def held_out_loss(model: GPT2LMHeadModel) -> float:
    """The loss on data that no run has seen."""
    dataset = ByteWindows("held_out")
    batch = torch.stack([dataset[index]["input_ids"] for index in range(len(dataset))])
    with torch.no_grad():
        loss: float = model(input_ids=batch, labels=batch).loss.item()
        return loss


def num_parameters_of_rank(checkpoint: Path) -> int:
    """How many parameters the first process held, by its part of a DeepSpeed checkpoint."""
    part = next(checkpoint.glob("*/mp_rank_00_model_states.pt"))
    weights = torch.load(part, map_location="cpu", weights_only=False)["module"]
    # tied weights share their storage and count once
    return sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())


def show_losses(console: Console, runs: Sequence[Run]) -> None:
    untouched, partbook = (run.losses() for run in runs)
    table = Table(title="Loss by step")
    for title in ("step", *(run.title for run in runs), "difference"):
        table.add_column(title, justify="right")
    every = max(1, len(untouched) // 12)
    for step, (a, b) in enumerate(zip(untouched, partbook, strict=True)):
        if step % every == 0 or step == len(untouched) - 1:
            table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(table)
    console.print(sketch(untouched, partbook), highlight=False, markup=False)


def sketch(untouched: Sequence[float], partbook: Sequence[float], *, rows: int = 10, columns: int = 64) -> str:
    """Both curves in characters: ``o`` untouched, ``+`` partbook, ``*`` both in one place."""
    low, high = min(*untouched, *partbook), max(*untouched, *partbook)
    columns = min(columns, len(untouched))
    grid = [[" "] * columns for _ in range(rows)]
    for losses, mark in ((untouched, "o"), (partbook, "+")):
        for column in range(columns):
            loss = losses[column * (len(losses) - 1) // max(1, columns - 1)]
            row = round((high - loss) / max(high - low, 1e-9) * (rows - 1))
            grid[row][column] = mark if grid[row][column] == " " else "*"
    labels = [f"{high:6.2f}", *[" " * 6] * (rows - 2), f"{low:6.2f}"]
    lines = [f"{label} |{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)]
    return "\n".join([*lines, f"       +{'-' * columns}", "        o untouched   + partbook   * both"])


def draw(runs: Sequence[Run], picture: Path) -> None:
    """Both curves, the untouched one as a broad band below the other, and under them their difference."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    untouched, partbook = (run.losses() for run in runs)
    figure, (curves, difference) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    curves.plot(untouched, color="#9ecae1", linewidth=7, label=f"{runs[0].title}, {runs[0].processes} process")
    curves.plot(partbook, color="#a63603", linewidth=1.5, label=f"{runs[1].title}, {runs[1].processes} processes")
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title("The same training script, with and without Partbook")
    curves.legend()
    difference.axhline(0, color="#9ecae1", linewidth=3)
    difference.plot([b - a for a, b in zip(untouched, partbook, strict=True)], color="#a63603", linewidth=1.5)
    difference.set_ylabel("partbook - untouched")
    difference.ticklabel_format(axis="y", scilimits=(0, 0))
    difference.set_xlabel("step")
    figure.savefig(picture, dpi=150)


def demo(steps: int) -> tuple[float, float]:
    """Runs everything and shows it.

    Returns the largest difference between the losses of one step, and that between the losses on held-out data.
    """
    console = Console()
    device = device_type()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    runs = plan_runs(steps, device)
    seconds = [execute(run, steps, device) for run in runs]

    show_losses(console, runs)
    draw(runs, OUT / "loss.png")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    models = [load(OUT / "untouched"), load(OUT / "hf")]
    held_out = [held_out_loss(model) for model in models]
    held = [models[0].num_parameters(), num_parameters_of_rank(OUT / "checkpoint")]
    summary = Table(title="The trained models, both loaded by GPT2LMHeadModel.from_pretrained")
    for title in ("run", "processes", "parameters each", "seconds", "held-out loss"):
        summary.add_column(title, justify="left" if title == "run" else "right")
    for run, number, time_taken, loss in zip(runs, held, seconds, held_out, strict=True):
        summary.add_row(run.title, str(run.processes), f"{number:,}", f"{time_taken:.0f}", f"{loss:.6f}")
    console.print(summary)
    console.print(f"Picture: {OUT / 'loss.png'}   Hugging Face folder: {OUT / 'hf'}", highlight=False)
    largest = max(abs(a - b) for a, b in zip(runs[0].losses(), runs[1].losses(), strict=True))
    return largest, abs(held_out[0] - held_out[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train one model untouched and with Partbook, and compare.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    args = parser.parse_args()
    os.chdir(ROOT)
    # so that a demo that is told to end also ends the run that it has started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        largest, held_out = demo(args.steps)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"max loss difference: {largest:.1e}")
    # written so that a loss that is not a number fails too
    if not (largest <= LARGEST_DIFFERENCE and held_out <= LARGEST_DIFFERENCE):
        print(
            f"The two runs do not agree: by step their losses differ by up to {largest:.1e}, on held-out data by "
            f"{held_out:.1e}; {LARGEST_DIFFERENCE:.0e} is allowed.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
