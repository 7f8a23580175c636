"""Megatron's distributed checkpoints of scheduled models: other meshes, other schedules, interrupted saves."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megatron_training as megatron
import models
from partbook.dialects.megatron import (
    CheckpointError,
    checkpoints,
    consolidate,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)
from ranks import on_ranks, run_on_ranks

ADAM = {"optimizer": "adam", "lr": 1e-3, "adam_eps": 1e-5, "weight_decay": 0.1}
FUSED = {"fuse_qkv": True, "fuse_gate_up": True}


def start(case: dict[str, Any], seed: int = 0) -> megatron.Training:
    """``seed``: of the weights, which a load replaces."""
    sizes = {name: case[name] for name in ("tp", "pp", "vp") if name in case}
    megatron.start(**sizes)
    dense = getattr(models, case.get("family", "llama"))(layers=4, seed=seed, **case.get("built_with", {}))
    return megatron.train(
        case.get("family", "llama"), dense, vp=case.get("vp"), options=case.get("options"),
        distributed=case.get("distributed", False), optimizer=ADAM,
    )  # fmt: skip


def steps(training: megatron.Training, first: int, count: int = 2) -> list[float]:
    batches = ([part for [part] in megatron.batches_of(step)] for step in range(first, first + count))
    return [float(training.step(batch)[0]) for batch in batches]


def save(rank: int, case: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    training = start(case)
    steps(training, 0)
    save_checkpoint(folder, training.chunks, training.optimizer, iteration=2, extra={"note": "kept"})
    state = consolidate(training.chunks)
    return state, steps(training, 2)


def load(rank: int, case: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    training = start(case, seed=1)
    assert load_checkpoint(folder, training.chunks, training.optimizer) == (2, {"note": "kept"})
    state = consolidate(training.chunks)
    return state, steps(training, 2)


def world(case: dict[str, Any]) -> int:
    return case.get("tp", 1) * case.get("pp", 1)


THERE_AND_BACK = [
    ({"tp": 2, "pp": 2}, {"pp": 2}),
    ({"tp": 2, "pp": 2}, {"tp": 2}),
    ({"tp": 2, "pp": 2, "family": "gpt2"}, {"pp": 2, "family": "gpt2", "vp": 2}),
    ({"tp": 2, "pp": 2, "family": "gpt2"}, {"tp": 2, "family": "gpt2", "options": {"fuse_qkv": True}}),
    ({"tp": 2, "options": FUSED}, {"tp": 1}),
    ({"tp": 2, "options": FUSED, "distributed": True}, {"pp": 2, "distributed": True}),
]


@pytest.mark.parametrize(("saved", "loaded"), THERE_AND_BACK, ids=str)
def test_a_checkpoint_goes_on_at_another_mesh(saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path) -> None:
    wanted, losses = run_on_ranks(world(saved), save, saved, tmp_path)[0]
    for found, more in run_on_ranks(world(loaded), load, loaded, tmp_path):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        assert more == pytest.approx(losses, rel=1e-5)


def save_and_be_killed(rank: int, folder: Path, place: str) -> None:
    training = start({"tp": 2})
    steps(training, 0)
    save_checkpoint(folder, training.chunks, training.optimizer, iteration=1)
    torch.save(consolidate(training.chunks), folder / f"wanted-{rank}")
    steps(training, 2)
    owner, name = (checkpoints.dist_checkpointing, "save") if place == "files" else (checkpoints, "_write")
    untouched = getattr(owner, name)

    def kill(*args: Any) -> None:
        if place == "files":
            untouched(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill)
    save_checkpoint(folder, training.chunks, training.optimizer, iteration=2)


def load_the_latest(rank: int, folder: Path) -> tuple[int, bool, list[int]]:
    training = start({"tp": 2}, seed=1)
    iteration, _ = load_checkpoint(folder, training.chunks, training.optimizer)
    state, wanted = consolidate(training.chunks), torch.load(folder / f"wanted-{rank}")
    is_equal = all(torch.equal(state[name], value) for name, value in wanted.items())
    # What the interrupted save left is no hindrance.
    save_checkpoint(folder, training.chunks, training.optimizer, iteration=2)
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 7 .* there are \[1, 2\]"):
        load_checkpoint(folder, training.chunks, iteration=7)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere"):
        load_checkpoint(folder / "nowhere", training.chunks)
    return iteration, is_equal, sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize("place", ["files", "the name of the latest"])
def test_a_killed_save_leaves_the_checkpoint_before_it(place: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="died by SIGKILL"):
        run_on_ranks(2, save_and_be_killed, tmp_path, place)
    assert run_on_ranks(2, load_the_latest, tmp_path) == [(1, True, [1, 2])] * 2


def load_a_model_of_another_shape(rank: int, folder: Path) -> None:
    training = start({"built_with": {"intermediate_size": 96}})
    before = consolidate(training.chunks)
    with pytest.raises(CheckpointError, match=r"does not fit the model: Global shape mismatch .*mlp"):
        load_checkpoint(folder, training.chunks)
    assert all(torch.equal(before[name], value) for name, value in consolidate(training.chunks).items())


def test_another_model_is_refused(tmp_path: Path) -> None:
    run_on_ranks(1, save, {}, tmp_path)
    run_on_ranks(1, load_a_model_of_another_shape, tmp_path)


@on_ranks(4)
def test_the_export_is_a_folder_that_from_pretrained_loads(rank: int, tmp_path: Path) -> None:
    training = start({"tp": 2, "pp": 2, "family": "gpt2"})
    steps(training, 0)
    save_pretrained(training.chunks, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in consolidate(training.chunks).items():
        assert torch.equal(found[name], value), name
