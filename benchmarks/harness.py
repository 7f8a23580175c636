"""Measure training steps of several systems against each other, each in rank processes of its own, in turns."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# What a rank must find in its environment before it imports torch. A waiting thread sleeps: spinning would
# take the core from the rank that it waits for, and would be counted as work.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # wanted by name only: the ranks meet through a file
}


@dataclass(frozen=True)
class Trial:
    """What a system runs on one rank: ``step`` is forward, loss and backward, and returns the loss.

    ``model`` holds the parameters. ``gradient`` looks up, after a step, the gradient that tells whether the backward
    was right: that of a parameter which no rank splits, as near to the input as can be.
    """

    model: nn.Module
    step: Callable[[], torch.Tensor]
    gradient: Callable[[], torch.Tensor | None]
    # what else a step tells
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One step on one rank, in seconds; ``cpu`` counts all threads of the process."""

    wall: float
    cpu: float
    loss: float


@dataclass(frozen=True)
class Ready:
    """The first step of one rank, its seconds and its memory in bytes.

    ``built`` are the seconds until the trials of the rank were made, ``first`` those of the first step, compilations
    included. ``tensors`` is the peak of all tensors alive in a step; ``resident`` that of the process, imports
    included.
    """

    loss: float
    gradient: torch.Tensor | None
    tensors: int
    resident: int
    built: float
    first: Sample
    extra: dict[str, Any] = field(default_factory=dict)


class RankFailed(RuntimeError):
    """A rank raised, died, or did not answer in time."""


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _step(trial: Trial) -> Sample:
    trial.model.zero_grad(set_to_none=True)
    if dist.is_initialized():
        dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    loss = trial.step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(wall, cpu, float(_full(loss.detach())))


def _peak_tensor_bytes(trial: Trial) -> int:
    """Bytes of the tensors alive before a step, plus the most that the step adds to them. Runs a step."""
    trial.model.zero_grad(set_to_none=True)
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
    # a compiled system holds tensors without storage
    real = [value for value in local if not isinstance(value, FakeTensor | FunctionalTensor) and not value.is_meta]
    storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in real}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trial.step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return sum(storages.values()) + peak


def _first_step(trial: Trial) -> tuple[Sample, torch.Tensor | None]:
    sample = _step(trial)
    gradient = trial.gradient()
    return sample, None if gradient is None else _full(gradient).detach().float().clone()


def _serve(
    link: Connection, rank: int, size: int, log: str, build: Callable[..., Mapping[str, Trial]], job: Any
) -> None:
    """A rank process: build the trials, then run the step of each name received until None comes."""
    with open(log, "ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    faulthandler.register(signal.SIGUSR1)
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{log[: -len('.0')]}.store", rank=rank, world_size=size)
        start = time.perf_counter()
        trials = build(job)
        built = time.perf_counter() - start
        first = {name: _first_step(trial) for name, trial in trials.items()}
        tensors = {name: _peak_tensor_bytes(trial) for name, trial in trials.items()}
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ready = {}
        for name, (sample, gradient) in first.items():
            ready[name] = Ready(sample.loss, gradient, tensors[name], resident, built, sample, trials[name].extra)
        link.send(ready)
        while (name := link.recv()) is not None:
            link.send(_step(trials[name]))
    except BaseException:
        link.send(traceback.format_exc())
        sys.exit(1)


class Ranks:
    """The rank processes of one system, asleep until asked for a step."""

    def __init__(
        self, system: str, size: int, build: Callable[..., Mapping[str, Trial]], job: Any, folder: Path
    ) -> None:
        self.system = system
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._links = [ours for ours, _ in pairs]
        self._logs = [folder / f"{system}.{rank}" for rank in range(size)]
        self._processes = [
            context.Process(target=_serve, args=(link, rank, size, str(self._logs[rank]), build, job), daemon=True)
            for rank, (_, link) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that the death of a rank ends its link

    def ready(self, deadline: float) -> dict[str, list[Ready]]:
        replies = self._replies(deadline)
        return {name: [reply[name] for reply in replies] for name in replies[0]}

    def step(self, name: str, deadline: float) -> list[Sample]:
        for link in self._links:
            with contextlib.suppress(BrokenPipeError):  # the reply tells why
                link.send(name)
        return self._replies(deadline)

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(None)
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()

    def _replies(self, deadline: float) -> list[Any]:
        replies: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._links))
        while waiting:
            # a failed rank leaves its peers without an answer: they get a moment for their own report
            arrived = wait(list(waiting.values()), timeout=3 if failures else max(deadline - time.monotonic(), 0))
            if not arrived:
                for rank in waiting:
                    if pid := self._processes[rank].pid:
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                failures |= dict.fromkeys(waiting, "no answer in time; its stack:")
                break
            for rank, link in [(rank, link) for rank, link in waiting.items() if link in arrived]:
                del waiting[rank]
                try:
                    reply = link.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    reply = f"died with exit code {self._processes[rank].exitcode}"
                (failures if isinstance(reply, str) else replies)[rank] = reply
        if failures:
            # the ranks that only lost a peer come last
            order = sorted(failures, key=lambda rank: "gloo/transport" in failures[rank])
            raise RankFailed(
                "\n".join(f"{self.system}, rank {rank}: {failures[rank]}{self._log(rank)}" for rank in order)
            )
        return [replies[rank] for rank in range(len(self._links))]

    def _log(self, rank: int) -> str:
        lines = self._logs[rank].read_text(errors="replace").splitlines()[-30:] if self._logs[rank].exists() else []
        return "".join(f"\n    | {line}" for line in lines)


@contextlib.contextmanager
def rank_environment() -> Iterator[None]:
    """What a process started inside finds in its environment: ``RANK_ENVIRONMENT``."""
    before = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
    os.environ.update(RANK_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


@dataclass(frozen=True)
class System:
    """A contestant: ``build`` makes the trials of one rank from the job; a ``peer`` is what ours is compared with."""

    name: str
    ranks: int
    build: Callable[[Any], Mapping[str, Trial]]
    peer: bool = False


@dataclass
class Record:
    """All that was measured of one trial: ``samples[round][rank]``."""

    ready: list[Ready]
    samples: list[list[Sample]]

    @property
    def wall(self) -> float:
        """Median over the rounds of the slowest rank, in seconds."""
        return statistics.median(max(sample.wall for sample in ranks) for ranks in self.samples)

    @property
    def best_wall(self) -> float:
        """The quickest round of the slowest rank, in seconds: what a busy machine disturbs least."""
        return min(max(sample.wall for sample in ranks) for ranks in self.samples)

    @property
    def cpu(self) -> float:
        """Median over the rounds of the busiest rank, in seconds."""
        return statistics.median(max(sample.cpu for sample in ranks) for ranks in self.samples)

    @property
    def cpu_mean(self) -> float:
        """Median over the rounds of the mean over the ranks, in seconds."""
        return statistics.median(statistics.fmean(sample.cpu for sample in ranks) for ranks in self.samples)


def measure(
    systems: Sequence[System], job: Any, rounds: int, deadline: float, warmup: int = 1
) -> dict[tuple[str, str], Record]:
    """Start all systems, then time one step of each in every round, backwards in every second one.

    Keys are (system, trial). Raises RankFailed with the traceback of the failing rank.
    """
    running: list[Ranks] = []
    records: dict[tuple[str, str], Record] = {}
    with tempfile.TemporaryDirectory() as folder, rank_environment():
        try:
            for system in systems:
                running.append(Ranks(system.name, system.ranks, system.build, job, Path(folder)))
                for name, ready in running[-1].ready(deadline).items():
                    records[system.name, name] = Record(ready, [])
            turns = [(ranks, key) for ranks in running for key in records if key[0] == ranks.system]
            for turn in range(-warmup, rounds):
                for ranks, key in turns if turn % 2 else reversed(turns):
                    if len(running) > 1:
                        # While others ran, this one's memory left the caches: training is not like that.
                        ranks.step(key[1], deadline)
                    samples = ranks.step(key[1], deadline)
                    if turn >= 0:
                        records[key].samples.append(samples)
        finally:
            for ranks in running:
                ranks.close()
    return records


def overhead(before: Record, after: Record) -> tuple[float, float, float]:
    """Relative CPU time that ``after`` adds in one process: median of the pairs of steps, and its 95 % interval."""
    pairs = zip(before.samples, after.samples, strict=True)
    ratios = [new[0].cpu / old[0].cpu - 1 for old, new in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]
