"""Run a function on several processes that form one gloo world, and bring back their values, tracebacks and stacks.

A template process imports torch, transformers and DeepSpeed once and runs nothing. Every rank is a fresh fork of it: it
starts in milliseconds, and no process group, seed or framework global outlives the test.
"""

import ast
import contextlib
import functools
import inspect
import marshal
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

import one_rank
from one_rank import Job, Outcome

# The template skips what is not installed. No import may start a thread: a fork would lose it.
PRELOAD = [
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "torch.distributed.pipelining",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    # 2 s of deepspeed.initialize, which imports a compiled optimizer (deepspeed/runtime/zero/muon, 0.19)
    "torch._inductor.compile_fx",
]

# seconds: for hangs, so far above what any test takes on a machine that does other things too
TIMEOUT = 300.0

# seconds that the other ranks have left once one has failed
GRACE = 2.0

# what gloo says on a rank whose peer is gone: never the cause
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def on_ranks(world_size: int, *, timeout: float = TIMEOUT) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run the decorated ``def test_x(rank, ...)`` on every rank, as ``run_on_ranks`` does.

    After ``rank`` come pytest parameters and fixtures, with picklable values.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        signature = inspect.signature(test)
        rank, *requested = signature.parameters.values()
        assert rank.name == "rank", f"{test.__qualname__}: the first parameter must be 'rank', not {rank.name!r}"

        @functools.wraps(test)
        def on_every_rank(**values: object) -> None:
            run_on_ranks(world_size, test, timeout=timeout, **values)

        on_every_rank.__signature__ = signature.replace(parameters=requested)  # type: ignore[attr-defined]
        return on_every_rank

    return decorate


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: object, timeout: float = TIMEOUT, **kwargs: object
) -> list[Any]:
    """The values of ``function(rank, *args, **kwargs)`` in the order of the ranks, which all have the same seed.

    ``function`` stands at the top level of a module; arguments and values are picklable.
    ``timeout``: seconds, without the start of the template.
    Fails the test when a rank raises, dies or still runs at the time-out; skips it when a rank skips.
    """
    assert "<locals>" not in function.__qualname__, f"{function.__qualname__} must stand at the top level of a module"
    try:
        arguments = pickle.dumps((args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{function.__qualname__}: cannot send {args} {kwargs} to the ranks: {error}") from error
    source = str(sys.modules[function.__module__].__file__)
    template = start_template()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[Rank] = []
        try:
            for number in range(world_size):
                job = Job(
                    rank=number,
                    world_size=world_size,
                    timeout=timeout,
                    folder=Path(folder),
                    environment=dict(os.environ),
                    module=function.__module__,
                    source=source,
                    code=code_with_asserts(source),
                    function=function.__qualname__,
                    arguments=arguments,
                )
                ranks.append(Rank(job, template.Process(target=one_rank.run, args=(job,))))
                ranks[-1].process.start()
            wait_for(ranks, timeout)
            dump_stacks([rank for rank in ranks if rank.ended is None])
        finally:
            started = [rank.process for rank in ranks if rank.process.pid is not None]
            for process in started:
                process.kill()
            for process in started:
                process.join()
        outcomes = [rank.outcome() for rank in ranks]
        outputs = [rank.read("output") for rank in ranks]
    return values_of(outcomes, outputs)


@dataclass
class Rank:
    """A rank as its parent sees it. ``ended``: on the monotonic clock, None while it runs."""

    job: Job
    process: ForkServerProcess
    ended: float | None = None

    def read(self, content: one_rank.Content) -> str:
        path = self.job.file(content)
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self) -> Outcome:
        code = self.process.exitcode
        if self.job.file("outcome").exists():
            left: Outcome = pickle.loads(self.job.file("outcome").read_bytes())
            if code == 0 or left.kind == "raised":
                return left
        # without the frames below the function
        stack = re.sub(r'  File "[^"]*one_rank.py", line \d+ in call\n.*', "", self.read("stack"), flags=re.DOTALL)
        if self.ended is None or code is None:
            return Outcome("stopped", math.inf, f"was still running (timeout={self.job.timeout:g} s)", stack)
        cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Outcome("died", self.ended, f"died {cause}", stack)


@functools.cache
def start_template() -> ForkServerContext:
    """Start the process that all ranks are forked from, and wait until it has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, one_rank.ENVIRONMENT):
        forkserver.ensure_running()
    first = context.Process()
    first.start()
    first.join()
    return context


@functools.cache
def code_with_asserts(source: str) -> bytes:
    """The marshalled code of a test file, whose asserts report their values as in any other test."""
    text = Path(source).read_bytes()
    tree = ast.parse(text, source)
    rewrite_asserts(tree, text, source)
    return marshal.dumps(compile(tree, source, "exec", dont_inherit=True))


def wait_for(ranks: Sequence[Rank], timeout: float) -> None:
    """Wait until all ranks have ended, the time is out, or ``GRACE`` is over after a failure."""
    deadline = time.monotonic() + timeout
    while running := {rank.process.sentinel: rank for rank in ranks if rank.ended is None}:
        for sentinel in connection.wait(list(running), max(0, deadline - time.monotonic())):
            rank = running[sentinel]  # type: ignore[index]
            rank.process.join()
            rank.ended = time.monotonic()
            if rank.outcome().kind in ("raised", "died"):
                deadline = min(deadline, rank.ended + GRACE)
        if time.monotonic() > deadline:
            return


def dump_stacks(running: Sequence[Rank]) -> None:
    """Let each rank write the Python stacks of its threads into its file."""
    for rank in running:
        assert rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    stacks: list[str] = [""] * len(running)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        before, stacks = stacks, [rank.read("stack") for rank in running]
        # written to the end when nothing more comes
        if all(stacks) and stacks == before:
            return
        time.sleep(0.1)


def values_of(outcomes: Sequence[Outcome], outputs: Sequence[str]) -> list[Any]:
    """The values of all ranks; fails or skips the test when there are none."""
    failed = [outcome for outcome in outcomes if outcome.kind in ("raised", "died", "stopped")]
    skipped = [outcome for outcome in outcomes if outcome.kind == "skipped"]
    if skipped and all(lost_its_peer(outcome) for outcome in failed):
        pytest.skip(skipped[0].summary)
    if failed:
        pytest.fail(report(outcomes, outputs), pytrace=False)
    return [pickle.loads(outcome.value) for outcome in outcomes]


def lost_its_peer(outcome: Outcome) -> bool:
    return outcome.kind == "raised" and any(words in outcome.detail for words in PEER_IS_GONE)


def report(outcomes: Sequence[Outcome], outputs: Sequence[str]) -> str:
    """All ranks, the one that failed first on top; ranks without a fault at the end."""

    def place(rank: int) -> tuple[bool, bool, float]:
        outcome = outcomes[rank]
        return outcome.kind in ("returned", "skipped"), lost_its_peer(outcome), outcome.time

    order = sorted(range(len(outcomes)), key=place)
    sections = [f"rank {order[0]} of {len(outcomes)} {outcomes[order[0]].summary}"]
    for rank in order:
        headline = "skipped" if outcomes[rank].kind == "skipped" else outcomes[rank].summary or "returned"
        sections.append(f"----- rank {rank} {headline}\n{outcomes[rank].detail}")
        if outputs[rank]:
            sections.append(f"----- rank {rank} printed\n{outputs[rank]}")
    return "\n".join(sections)
