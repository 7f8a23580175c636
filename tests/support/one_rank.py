"""What one rank does: redirect its output, join the world, call the function and leave an ``Outcome`` in a file."""

import faulthandler
import importlib.util
import inspect
import marshal
import operator
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
import torch.distributed as dist

# OpenMP, huggingface_hub and DeepSpeed read these at import, so the template of the ranks needs them too.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # a gloo world computes on the CPU, also on a machine with a GPU
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}

# seconds after the time-out until a rank gives up by itself; before that, pytest shows its stack and kills it
SLACK = 30

Content = Literal["output", "stack", "outcome"]


@dataclass(frozen=True)
class Job:
    """The call that one rank makes, its place in the world, and the folder for its files.

    ``code``: the marshalled code of the function's module, with the asserts that pytest has rewritten.
    ``arguments``: pickled, because they may be of a class of that module.
    """

    rank: int
    world_size: int
    timeout: float
    folder: Path
    environment: dict[str, str]
    module: str
    source: str
    code: bytes
    function: str
    arguments: bytes

    def file(self, content: Content) -> Path:
        return self.folder / f"{content}-{self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. ``time`` is on the monotonic clock, which all processes of a machine share."""

    kind: Literal["returned", "skipped", "raised", "died", "stopped"]
    time: float
    summary: str = ""
    detail: str = ""
    value: bytes = b""


def run(job: Job) -> None:
    redirect_output(job)
    outcome = call(job)
    # all of it or nothing, should the rank be killed here
    part = job.file("outcome").with_suffix(".part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(job.file("outcome"))
    sys.exit(1 if outcome.kind == "raised" else 0)


def redirect_output(job: Job) -> None:
    """Send stdout and stderr, of C++ too, to one file, and the Python stacks to another, on SIGUSR1 or on a crash."""
    output = os.open(job.file("output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # what was printed before an os._exit would be lost otherwise
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack = job.file("stack").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    # only when pytest itself has gone
    faulthandler.dump_traceback_later(job.timeout + SLACK, exit=True, file=stack)


def call(job: Job) -> Outcome:
    """Whatever the function raises is an outcome, ``SystemExit`` too."""
    try:
        join_world(job)
        function = load_function(job)
        args, kwargs = pickle.loads(job.arguments)
        value = pickle.dumps(function(job.rank, *args, **kwargs))
    except pytest.skip.Exception as skip:
        return Outcome("skipped", time.monotonic(), str(skip))
    except BaseException as error:
        summary = traceback.format_exception_only(error)[0].partition("\n")[0]
        # without the frame of this function
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return Outcome("raised", time.monotonic(), f"raised {summary}", "".join(traceback.format_exception(error)))
    return Outcome("returned", time.monotonic(), value=value)


def join_world(job: Job) -> None:
    rank, world_size = str(job.rank), str(job.world_size)
    os.environ.clear()
    os.environ.update(job.environment | ENVIRONMENT)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_SIZE=world_size)
    # DeepSpeed wants an address; the ranks meet in a file and nobody opens this port
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    if "deepspeed" in sys.modules:
        # DeepSpeed reads only this entry (deepspeed/comm/torch.py, 0.19). Left alone, it probes a compiler for the
        # other entries and then compiles for 46 s an operation that only inference needs.
        sys.modules["deepspeed"].ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + SLACK),
    )
    # a rank that is quick to leave would break the connections that others are still making
    dist.barrier()


def load_function(job: Job) -> Any:
    """The function of ``job``. Its module is loaded under its own name, so that pickle finds the classes in it."""
    if job.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(job.module, job.source)
        assert spec is not None
        module = sys.modules[job.module] = importlib.util.module_from_spec(spec)
        exec(marshal.loads(job.code), module.__dict__)
    return inspect.unwrap(operator.attrgetter(job.function)(sys.modules[job.module]))
