"""Run the real command lines of the launchers, with a time limit and all of their output when one is passed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# Threads that spin would take the two cores of a small machine from the other ranks.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Finished:
    """How a command ended. ``time``: when, in seconds since the epoch."""

    code: int
    output: str
    time: float


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def launch(*command: object, cwd: Path, timeout: float = 300, code: int = 0) -> Finished:
    """Run ``command`` to its end; see ``launch_all``."""
    return launch_all([command], cwd=cwd, timeout=timeout, code=code)[0]


def launch_all(
    commands: Sequence[Sequence[object]], *, cwd: Path, timeout: float = 300, code: int = 0
) -> list[Finished]:
    """Run ``commands`` side by side, each a Python command line without its interpreter.

    Fails the test, showing what all of them printed, when one still runs after ``timeout`` seconds (its whole process
    group is killed) or ends with another exit code than ``code``.
    """
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_RANK} | ENVIRONMENT
    # the console scripts of this interpreter's environment: deepspeed finds its own there
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    logs = [cwd / f"output-{number}.log" for number in range(len(commands))]
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=cwd,
                env=environment,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command, log in zip(commands, logs, strict=True)
        ]
        try:
            ended = [_wait(process, deadline) for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finished = [Finished(p.returncode, log.read_text(), at) for p, log, at in zip(processes, logs, ended, strict=True)]
    for command, one in zip(commands, finished, strict=True):
        if one.code != code:
            how = f"was still running after {timeout:g} s" if one.code < 0 else f"ended with {one.code}, not {code}"
            everything = "\n".join(
                f"----- {' '.join(map(str, c))}\n{f.output}" for c, f in zip(commands, finished, strict=True)
            )
            pytest.fail(f"{' '.join(map(str, command))} {how}\n{everything}", pytrace=False)
    return finished


def _wait(process: subprocess.Popen[bytes], deadline: float) -> float:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, deadline - time.monotonic()))
    return time.time()


def plain(script: Path, *arguments: object) -> list[object]:
    """The command that runs ``script`` in one process, as a world of one, without Partbook."""
    program = (
        "import os, runpy, sys, deepspeed\n"
        "deepspeed.ops.__compatible_ops__ = {'deepspeed_shm_comm': False}\n"
        "os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_SIZE='1',\n"
        f"                  MASTER_ADDR='localhost', MASTER_PORT='{free_port()}')\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = os.path.dirname(sys.argv[0])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return ["-c", program, script, *arguments]
