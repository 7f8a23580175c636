"""Megatron's distributed checkpoints of scheduled models: other meshes, other schedules, interrupted saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_training as megatron
import models
from partbook.dialects.megatron import consolidate, load_checkpoint, save_checkpoint
from ranks import run_on_ranks

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
