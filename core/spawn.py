"""Run a function on processes of this machine that form one gloo world; a failing rank's traceback comes back."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# One thread a rank: ranks share the machine's cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    """``function(*args)`` on ``world`` new processes; their results in rank order. ``timeout``: seconds.

    Raises the failing rank's error with its traceback, TimeoutError after the time limit (all ranks are ended), and
    TypeError when function or arguments cannot be pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "task")
        task.write_bytes(_pickled((function, args)))
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            context = multiprocessing.start_processes(
                _rank, (world, folder), nprocs=world, join=False, start_method="spawn"
            )
        assert context is not None
        end = time.monotonic() + timeout
        try:
            while not context.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"{world} ranks did not finish within {timeout:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder, f"result{rank}"), weights_only=False) for rank in range(world)]


def _pickled(content: Any) -> bytes:
    try:
        return pickle.dumps(content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"this cannot be sent to other processes: {error}\n"
            "  hint: pass functions that stand at the top level of a module, not lambdas"
        ) from error


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        function, args = pickle.loads(Path(folder, "task").read_bytes())
        torch.save(function(*args), Path(folder, f"result{rank}"))
    finally:
        dist.destroy_process_group()
