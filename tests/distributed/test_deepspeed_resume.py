"""A DeepSpeed checkpoint continues at other parallel sizes as if nothing had happened, optimizer states included."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import models
from partbook.core import PartbookError, WeightsError
from partbook.dialects.deepspeed import consolidate, initialize
from ranks import on_ranks, run_on_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 2e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 8}}


@dataclass(frozen=True)
class Size:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp {self.tp} pp {self.pp} dp {self.dp} zero {self.zero}"


def start(family: str, size: Size, *, dtype: str = "fp32", options: Any = None, **built_with: Any) -> Any:
    config = {
        # the global batch is the same at every size
        "train_micro_batch_size_per_gpu": 4 // size.dp,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": size.zero, "reduce_bucket_size": 5000},
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": copy.deepcopy(ADAMW),
        "scheduler": copy.deepcopy(WARMUP),
    }
    model = getattr(models, family)(**built_with)
    sizes = {"tp": size.tp, "pp": size.pp}
    return initialize(model=model, schedule=family, schedule_args=options, config=config, **sizes)[0]


def train(engine: Any, step: int) -> float:
    """One step; the mean loss over micro-batches and dp."""
    mesh = engine.scheduled.mesh
    wholes = [models.batch(size=4, length=10 + 2 * i, seed=2 * step + i, padded=True) for i in range(2)]
    for whole in wholes:
        # every label counts: the mean over dp of means is the mean
        whole["labels"] = whole["input_ids"].clone()
    parts = [{name: value.chunk(mesh.dp)[mesh.dp_rank] for name, value in whole.items()} for whole in wholes]
    if mesh.pp > 1:
        return engine.train_batch(data_iter=iter(parts)).item()
    losses = []
    for part in parts:
        loss = engine(**part).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).float().mean()
    if mesh.dp > 1:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def save(rank: int, family: str, size: Size, folder: str, kwargs: dict[str, Any]) -> tuple[list[float], Any]:
    """Train, save, go on: the losses after it, and the weights in the end."""
    engine = start(family, size, **kwargs)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder, client_state={"seen": 11})
    losses = [train(engine, step) for step in range(2, 5)]
    return losses, consolidate(engine)


def resume(rank: int, family: str, size: Size, folder: str, kwargs: dict[str, Any]) -> tuple[list[float], Any]:
    """Other weights at first; those of the checkpoint, its optimizer's states, its counters after it."""
    engine = start(family, size, **kwargs, seed=1)
    _, client = engine.load_checkpoint(folder)
    assert client["seen"] == 11
    assert engine.global_steps == 2
    losses = [train(engine, step) for step in range(2, 5)]
    assert engine.global_steps == 5
    return losses, consolidate(engine)


def check(family: str, saved: Size, others: list[Size], folder: Path, limit: float = 1e-5, **kwargs: Any) -> None:
    wanted, weights = run_on_ranks(saved.ranks, save, family, saved, str(folder), kwargs)[0]
    for size in others:
        for losses, state in run_on_ranks(size.ranks, resume, family, size, str(folder), kwargs):
            torch.testing.assert_close(losses, wanted, rtol=limit, atol=0, msg=lambda text, s=size: f"{s}: {text}")
            assert_same(state, weights, limit)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        error = float((found[name].float() - tensor.float()).abs().max() / tensor.float().abs().max())
        assert error <= 10 * limit, f"{name} differs by {error:.1e}"


def test_pipelines_continue_at_every_smaller_size(tmp_path: Path) -> None:
    """Tied weights, a padded vocabulary; without ZeRO and with it."""
    others = [Size(pp=2), Size(tp=2, zero=2), Size(zero=0)]
    check("gpt2", Size(tp=2, pp=2), others, tmp_path / "one")
    check("gpt2", Size(tp=2, pp=2, zero=0), [Size(pp=2, zero=0), Size(tp=2), Size()], tmp_path / "none")


def test_one_rank_continues_in_three_dimensions(tmp_path: Path) -> None:
    check("llama", Size(zero=0), [Size(tp=2, pp=2), Size(dp=2, zero=2), Size(pp=2, zero=0)], tmp_path)


def test_fused_projections_and_data_parallel_partitions(tmp_path: Path) -> None:
    """Two dp ranks have a part of each flat tensor; q, k and v are one parameter of three segments."""
    options = {"fuse_qkv": True, "fuse_gate_up": True}
    check("llama", Size(dp=2, zero=2), [Size(tp=2), Size(pp=2)], tmp_path, options=options)


def test_master_weights_of_16_bits(tmp_path: Path) -> None:
    check("gpt2", Size(pp=2, zero=0), [Size(tp=2), Size()], tmp_path, limit=2e-3, dtype="bf16")


def refusals(rank: int, folder: str) -> None:
    """Nothing is changed by any of them."""
    engine = start("gpt2", Size(pp=2))
    before = consolidate(engine)
    with pytest.raises(PartbookError, match=r"is not complete: it lacks mp_rank_01_model_states.pt"):
        engine.load_checkpoint(folder, tag="killed")
    with pytest.raises(PartbookError, match=r"is not complete: it lacks 1 optimizer files of model rank 0"):
        engine.load_checkpoint(folder, tag="partial")
    with pytest.raises(WeightsError, match=r"is of another model: 'transformer.*' is .* there and .* here"):
        engine.load_checkpoint(folder, tag="other")
    with pytest.raises(PartbookError, match=r"ZeRO stage 3, and at another size or stage \(here 1\)"):
        engine.load_checkpoint(folder, tag="three")
    for name, tensor in consolidate(engine).items():
        assert torch.equal(tensor, before[name])


def save_as(rank: int, folder: str, size: Size, tag: str, built_with: dict[str, Any]) -> None:
    engine = start("gpt2", size, **built_with)
    train(engine, 0)
    engine.save_checkpoint(folder, tag=tag)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_on_ranks(2, save_as, folder, Size(tp=2), "whole", {})
    run_on_ranks(1, save_as, folder, Size(), "other", {"layers": 3})
    run_on_ranks(1, save_as, folder, Size(zero=3), "three", {})
    for tag in ("killed", "partial"):
        shutil.copytree(tmp_path / "whole", tmp_path / tag)
    (tmp_path / "killed" / "mp_rank_01_model_states.pt").unlink()
    next((tmp_path / "partial").glob("*zero_pp_rank_0_mp_rank_00*")).unlink()
    run_on_ranks(2, refusals, folder)


@on_ranks(2)
def test_weights_alone(rank: int, tmp_path: Path) -> None:
    """``load_module_only`` leaves the optimizer, the learning rate and the counters as they are."""
    engine = start("gpt2", Size(tp=2))
    train(engine, 0)
    engine.save_checkpoint(str(tmp_path), tag="one")
    saved = consolidate(engine)
    other = start("gpt2", Size(pp=2), seed=1)
    other.load_checkpoint(str(tmp_path), tag="one", load_module_only=True)
    assert other.global_steps == 0
    for name, tensor in consolidate(other).items():
        assert torch.equal(tensor, saved[name])
    # and it trains
    losses = [train(other, 1) for _ in range(3)]
    assert losses[2] < losses[0]


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The head, which only the last stage has, matrices, and vectors."""
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": 0.02, "weight_decay": 0.0},
        {"params": [], "lr": 0.01, "weight_decay": 0.3},
        {"params": [], "lr": 0.005, "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if "lm_head" in name else 1 if parameter.dim() > 1 else 2]["params"].append(parameter)
    return groups


def start_grouped(size: Size, seed: int) -> Any:
    """With an optimizer and a scheduler of the script's own, and frozen embeddings."""
    model = models.gpt2(tied=False, seed=seed)
    model.transformer.wte.requires_grad_(False)
    optimizer = torch.optim.AdamW(groups_of(model), eps=1e-5)
    rates = [lambda step, base=base: base**step for base in (0.5, 0.8, 1.2)]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": size.zero},
        "zero_allow_untested_optimizer": True,
    }
    return initialize(
        model=model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, rates),
        schedule="gpt2", config=config, tp=size.tp, pp=size.pp,
    )[0]  # fmt: skip


def save_grouped(rank: int, size: Size, folder: str) -> tuple[list[float], Any]:
    engine = start_grouped(size, 0)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder)
    return [train(engine, step) for step in range(2, 5)], consolidate(engine)


def resume_grouped(rank: int, size: Size, folder: str) -> tuple[list[float], Any]:
    engine = start_grouped(size, 1)
    engine.load_checkpoint(folder)
    return [train(engine, step) for step in range(2, 5)], consolidate(engine)


@pytest.mark.parametrize(
    ("saved", "others"),
    [(Size(pp=2, zero=0), [Size(), Size(tp=2)]), (Size(tp=2), [Size(pp=2, zero=0)])],
    ids=["out of stages", "into stages"],
)
def test_groups_schedulers_and_frozen_parameters(saved: Size, others: list[Size], tmp_path: Path) -> None:
    """Every group has its own settings again, wherever its parameters are."""
    wanted, weights = run_on_ranks(saved.ranks, save_grouped, saved, str(tmp_path))[0]
    for size in others:
        for losses, state in run_on_ranks(size.ranks, resume_grouped, size, str(tmp_path)):
            torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
            assert_same(state, weights, 1e-5)


def start_cut(cuts: str, seed: int) -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": copy.deepcopy(ADAMW)}
    return initialize(model=models.gpt2(seed=seed), schedule="gpt2", config=config, pp=2, cuts=cuts)[0]


@on_ranks(2)
def test_other_cuts_of_the_same_size(rank: int, tmp_path: Path) -> None:
    engine = start_cut("transformer.h.0", 0)
    train(engine, 0)
    engine.save_checkpoint(str(tmp_path))
    other = start_cut("transformer.h.0.attn", 1)
    other.load_checkpoint(str(tmp_path))
    assert [train(other, step) for step in (1, 2)] == pytest.approx([train(engine, step) for step in (1, 2)], rel=1e-5)
