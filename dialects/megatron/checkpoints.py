"""Megatron's distributed checkpoints for trainers without Megatron-LM's own: at any mesh, whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint.api import CheckpointException

from partbook.core import PartbookError

from .weights import Chunks, _gather_parameters, stages_of

# As in Megatron-LM's checkpoint folders.
_LATEST = "latest_checkpointed_iteration.txt"
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class CheckpointError(PartbookError):
    """A checkpoint that is not there or does not fit. The model is as it was, unless its files are damaged."""


def save_checkpoint(
    folder: str | Path, model: Chunks, optimizer: Any = None, iteration: int = 0, extra: Mapping[str, Any] | None = None
) -> None:
    """Save chunks and optimizer as ``folder``/iter_0000010, and say that it is the latest once it is complete.

    ``extra``: what else to keep, equal on all ranks. Collective. Until it has returned, an interrupted save leaves the
    checkpoint before it as the latest. Random states are not saved.
    """
    target = Path(folder, f"iter_{iteration:07d}")
    partial = target.with_name(f".partial-{target.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _gather_parameters(model)
    with _states_of_torch_adam():
        state = _state_of(model, optimizer, is_loading=False)
        dist.barrier()
        dist_checkpointing.save({**state, "iteration": iteration, "extra": dict(extra or {})}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        _write(Path(folder, _LATEST), str(iteration))
    dist.barrier()


def load_checkpoint(folder: str | Path, model: Chunks, optimizer: Any = None, iteration: int | None = None) -> Any:
    """Load chunks and optimizer from the latest checkpoint in ``folder``, or that of ``iteration``: (iteration, extra).

    The mesh may be another one than that of the save. An optimizer of 16-bit training that is not loaded needs its
    ``reload_model_params()`` afterwards: it steps weights of its own. Collective. Raises
    CheckpointError where there is none.
    """
    source = _find(Path(folder), iteration)
    with _states_of_torch_adam(), torch.no_grad():
        state = _state_of(model, optimizer, is_loading=True)
        emptied = [entry.data for entry in nested_values(state) if getattr(entry, "allow_shape_mismatch", False)]
        before = [tensor.clone() for tensor in emptied]
        try:
            loaded = dist_checkpointing.load(state, str(source))
        except (CheckpointingException, CheckpointException) as error:
            # Of a vocabulary, which may be padded otherwise, Megatron sets all rows to zero before it looks.
            for tensor, content in zip(emptied, before, strict=True):
                tensor.copy_(content)
            raise CheckpointError(f"{source} does not fit the model: {_cause(error)}") from error
        for i, stage in enumerate(stages_of(model)):
            stage.load_state_dict(loaded[_key(i)])
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
    return loaded["iteration"], loaded["extra"]


def _cause(error: BaseException) -> BaseException:
    """What the first rank met, of an error of all ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _find(folder: Path, iteration: int | None) -> Path:
    if iteration is None:
        if not (folder / _LATEST).is_file():
            raise CheckpointError(f"there is no checkpoint in {str(folder)!r}: it has no {_LATEST}")
        iteration = int((folder / _LATEST).read_text())
    source = folder / f"iter_{iteration:07d}"
    if not source.is_dir():
        there = sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))
        raise CheckpointError(f"there is no checkpoint of iteration {iteration} in {str(folder)!r}; there are {there}")
    return source


def _state_of(model: Chunks, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    stages = stages_of(model)
    metadata = {**_RESHARDABLE, "dp_cp_group": stages[0].pg_collection.dp_cp}
    state: dict[str, Any] = {_key(i): stage.sharded_state_dict(metadata=metadata) for i, stage in enumerate(stages)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def _key(chunk: int) -> str:
    return f"model{chunk}"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def _states_of_torch_adam() -> Iterator[None]:
    """Inside, Megatron's distributed optimizer saves and loads the states of torch's AdamW, which it has where neither
    Apex nor Transformer Engine is installed (core 0.16): they count steps in each state."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        yield
        return
    cls = distrib_optimizer.DistributedOptimizer
    state_dict, get, put = cls.state_dict, cls._get_main_param_and_optimizer_states, _put_states
    known = cls._set_main_param_and_optimizer_states

    def with_states(self: Any) -> Any:
        _make_states(self.optimizer)
        return state_dict(self)

    def without_step(self: Any, parameter: Any) -> Any:
        states = dict(get(self, parameter))
        states.pop("step", None)
        return states

    def keep_step(self: Any, parameter: Any, tensors: Any) -> None:
        put(known, self, parameter, tensors)

    with (
        mock.patch.object(cls, "state_dict", with_states),
        mock.patch.object(cls, "_get_main_param_and_optimizer_states", without_step),
        mock.patch.object(cls, "_set_main_param_and_optimizer_states", keep_step),
    ):
        yield


def _make_states(optimizer: Any) -> None:
    """The states of an optimizer that has made no step yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def _put_states(known: Any, optimizer: Any, parameter: Any, tensors: Any) -> None:
    group, order = optimizer.model_param_group_index_map[parameter]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    if "step" in state:
        # One tensor was put into every state, and each step would count in it for all of them.
        state["step"] = state["step"].clone()
        tensors = {**tensors, "step": state["step"]}
    known(optimizer, parameter, tensors)
