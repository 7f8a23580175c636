"""python benchmarks/tracing.py --json tracing.json

What graphs cost: the seconds to trace a model and each of its blocks, and a training step (forward and backward) of a
model that runs on graphs against the same model without, alternating in one process. Blocks that are alike are traced
once: the table counts the runs of the model on fake tensors, of which one is made for each kind of inputs.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from families import DTYPES, blocks, ids, make, parts, witness
from harness import RankFailed, System, Trial, measure, overhead, rank_environment
from rich.console import Console
from rich.table import Table

# model, device of its weights
TRACED = (("gpt2-124m", "meta"), ("gpt2-124m", "cpu"), ("llama", "cpu"), ("llama-7b", "meta"))
RUN = ("gpt2", "llama")
MAX_SECONDS = 10.0
MAX_OVERHEAD = 0.02


@dataclass(frozen=True)
class Cost:
    """Tracing some modules: how many, the runs of the model that it took, the graphs that these recorded."""

    what: str
    modules: int
    cpu: float
    wall: float
    runs: int
    graphs: int


@dataclass(frozen=True)
class Job:
    model: str
    dtype: str
    batch: int
    sequence: int


def trace_costs(name: str, device: str) -> list[Cost]:
    """Run in a process of its own: the first trace of a process also pays for what torch imports and sets up then."""
    from partbook.core import create_schedule

    torch.set_num_threads(1)
    model = make(name, device=device)
    schedule = create_schedule(model)
    first, *others = blocks(name, model)
    groups = {"root": [""], "first block": [first], "other blocks": others, "attention, MLP": parts(name, model)}
    costs = []
    for what, paths in groups.items():
        with _counted() as counts:
            cpu, wall = time.process_time(), time.perf_counter()
            for path in paths:
                (schedule[path] if path else schedule).trace()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        costs.append(Cost(what, len(paths), cpu, wall, counts["runs"], counts["graphs"]))
    return costs


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Counts the runs on fake tensors that record a module, and the graphs that they give."""
    from partbook.core.tracing.session import Session

    counts, record = {"runs": 0, "graphs": 0}, Session.record

    def counting(*args: Any, **kwargs: Any) -> Any:
        recordings = record(*args, **kwargs)
        counts["runs"] += 1
        counts["graphs"] += len(recordings)
        return recordings

    Session.record = counting
    try:
        yield counts
    finally:
        Session.record = record


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with rank_environment(), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def cost_table(title: str, repeats: Sequence[list[Cost]]) -> tuple[Table, float]:
    """Medians over the repeats, and the CPU seconds for the root and all blocks."""
    shown = Table(title=title)
    for column in ("traced", "modules", "cpu s", "wall s", "runs of the model", "graphs"):
        shown.add_column(column, justify="left" if column == "traced" else "right")
    cpu = {}
    for costs in zip(*repeats, strict=True):
        first = costs[0]
        cpu[first.what] = statistics.median(cost.cpu for cost in costs)
        wall = statistics.median(cost.wall for cost in costs)
        counts = str(first.modules), f"{cpu[first.what]:.2f}", f"{wall:.2f}", str(first.runs), str(first.graphs)
        shown.add_row(first.what, *counts)
    return shown, cpu["root"] + cpu["first block"] + cpu["other blocks"]


def side_by_side(job: Job) -> Mapping[str, Trial]:
    """The model untouched, with a graph for every block, attention and MLP, and with these and one for the root; all
    over the same memory."""
    from partbook.core import create_schedule

    untouched = make(job.model, job.dtype)
    models = {"untouched": untouched, "parts": make(job.model, job.dtype), "root too": make(job.model, job.dtype)}
    theirs = dict(untouched.named_parameters())
    for name in ("parts", "root too"):
        schedule = create_schedule(models[name])
        paths = [*blocks(job.model, untouched), *parts(job.model, untouched)]
        for path in paths:
            schedule[path].trace()
        if name == "root too":
            schedule.trace()
        for key, parameter in models[name].named_parameters():
            parameter.data = theirs[key].data
    return {name: _trial(job, model) for name, model in models.items()}


def _trial(job: Job, model: torch.nn.Module) -> Trial:
    batch = ids(model, job.batch, job.sequence)

    def step() -> torch.Tensor:
        # the same dropout in all of them
        torch.manual_seed(0)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss

    return Trial(model, step, lambda: witness(model).grad)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="processes in which each model is traced")
    parser.add_argument("--models", nargs="*", choices=RUN, default=RUN, help="whose steps are timed")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each model (0: only trace)")
    # A short step: what a graph adds it adds to each call, which weighs most here.
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    console = Console(width=130)
    deadline = time.monotonic() + options.timeout
    raw: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "load": [os.getloadavg()]}
    for name, device in TRACED if options.repeats else ():
        repeats = [in_fresh_process(trace_costs, name, device) for _ in range(options.repeats)]
        shown, seconds = cost_table(f"tracing {name}, weights on {device}", repeats)
        console.print(shown)
        verdict = "within" if seconds <= MAX_SECONDS else "ABOVE"
        console.print(f"root and every block: {seconds:.2f} s CPU, {verdict} {MAX_SECONDS:.0f} s\n")
        raw[f"trace {name} {device}"] = [[asdict(cost) for cost in costs] for costs in repeats]
    for name in options.models if options.rounds else ():
        job = Job(name, options.dtype, options.batch, options.sequence)
        records = measure([System(name, 1, side_by_side)], job, options.rounds, deadline)
        untouched = records[name, "untouched"]
        for which, what in (("parts", "every block, attention and MLP"), ("root too", "these and the root")):
            record = records[name, which]
            median, low, high = overhead(untouched, record)
            verdict = "within" if high <= MAX_OVERHEAD else "ABOVE" if low > MAX_OVERHEAD else "too noisy to tell from"
            loss = abs(record.ready[0].loss - untouched.ready[0].loss)
            gradients = record.ready[0].gradient, untouched.ready[0].gradient
            console.print(
                f"{name}, {job.dtype}, {job.batch} x {job.sequence} tokens, graphs for {what}: {median:+.2%} CPU time "
                f"over {untouched.cpu * 1e3:.0f} ms (95 % interval {low:+.2%} to {high:+.2%}, {options.rounds} pairs), "
                f"{verdict} {MAX_OVERHEAD:.0%}; loss differs by {loss:.1e}, "
                f"gradient by {float((gradients[0] - gradients[1]).abs().max()):.1e}"
            )
        raw[f"run {name}"] = {
            which: [asdict(ranks[0]) for ranks in record.samples] for (_, which), record in records.items()
        }
    raw["load"].append(os.getloadavg())
    console.print(f"load average {raw['load'][0][0]:.1f} before, {raw['load'][1][0]:.1f} after; 1 thread")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(str(failure))
