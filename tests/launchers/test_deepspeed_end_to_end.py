"""Unedited scripts under the real ``deepspeed`` launcher, on processes of their own, against the same scripts alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from launch import Finished, free_port, launch, launch_all, plain

SCRIPTS = Path(__file__).parent / "scripts"
PARTBOOK = ("-m", "partbook.launchers.deepspeed")
DEEPSPEED = ("-m", "deepspeed.launcher.runner")
WAYS = ("training_data", "sampler", "explicit")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
# as in transformers' documentation
ALL_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def results(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote, in the order of the ranks."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(list(folder.glob("?.json"))))]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``loop.py`` in one process, without Partbook."""
    folder = tmp_path_factory.mktemp("alone")
    launch(*plain(SCRIPTS / "loop.py", "--out", folder / "out", "--deepspeed_config", config), cwd=folder)
    return results(folder / "out")[0]


def assert_trained_as(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for way in WAYS:
            assert rank[way]["seen"] == alone[way]["seen"]
            torch.testing.assert_close(rank[way]["losses"], alone[way]["losses"], rtol=1e-5, atol=0)
            # it trains: what the first loss stays at would be outside of the tolerance
            assert rank[way]["losses"][-1] < rank[way]["losses"][0] - 1e-2


def test_unedited_script_trains_as_alone(alone: dict[str, Any], config: Path, tmp_path: Path) -> None:
    """Data through training_data, DistributedSampler and an explicit one; flags between DeepSpeed's; three models."""
    launch(
        *(
            *PARTBOOK,
            "--schedule=gpt2",
            "--num_gpus",
            2,
            "--schedule-arg",
            "fuse_qkv=true",
            "--master_port",
            free_port(),
        ),
        *("--export", "folder", "--tp", 2, SCRIPTS / "loop.py", "--tp", 7, "--schedule", "its own", "--out", "out"),
        *("--deepspeed_config", config),
        cwd=tmp_path,
    )
    ranks = results(tmp_path / "out")
    assert_trained_as(alone, ranks)
    script = str(SCRIPTS / "loop.py")
    for number, rank in enumerate(ranks):
        assert rank["sizes"] == [number, 2]
        arguments = ["--tp", "7", "--schedule", "its own", "--out", "out", "--deepspeed_config", str(config)]
        assert rank["argv"] == [script, f"--local_rank={number}", *arguments]
        assert rank["own"] == ["its own", 7]
        assert rank["local_rank"] == number
        assert (rank["name"], rank["main"], rank["file"], rank["path"]) == ("__main__", True, script, str(SCRIPTS))
    # the script ends its process group before --export has its turn
    for number in range(len(WAYS)):
        weights = GPT2LMHeadModel.from_pretrained(tmp_path / "folder" / str(number)).state_dict()
        assert weights["transformer.wte.weight"].shape == (99, 32)
        assert weights["transformer.h.1.attn.c_attn.weight"].shape == (32, 96)


PLAN = """
from beside import gpt2

def plan(sch, options):
    assert options == {"answer": 42}
    gpt2(sch)
"""


def test_tp_groups_share_batches_and_a_dying_rank_ends_the_job(config: Path, tmp_path: Path) -> None:
    """tp 2 x dp 2; the schedule is a file that imports what lies beside the script; rank 2 dies in a step."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "mine.py").write_text(PLAN)
    ended = launch(
        *(*PARTBOOK, "--num_gpus", 4, "--schedule", "plans/mine.py:plan", "--schedule-arg=answer=42", "--tp=2"),
        *("--master_port", free_port(), SCRIPTS / "loop.py", "--out", "out", "--deepspeed_config", config, "--die", 2),
        cwd=tmp_path,
        code=7,
    )
    assert ended.time - float((tmp_path / "out" / "died").read_text()) < 60
    ranks = results(tmp_path / "out")
    assert len(ranks) == 4
    # by hand: without shuffling, dp rank r of 2 has the samples r, r + 2, ...
    for number, rank in enumerate(ranks):
        dp_rank = number // 2
        assert rank["explicit"]["seen"] == [[4 * step + dp_rank, 4 * step + 2 + dp_rank] for step in range(3)]
    for way in WAYS:
        first, second, third, fourth = (rank[way] for rank in ranks)
        assert first == second
        assert third == fourth
        mine, others = ({*itertools.chain.from_iterable(rank["seen"])} for rank in (first, third))
        assert not mine & others


def test_two_nodes_run_a_module(alone: dict[str, Any], config: Path, tmp_path: Path) -> None:
    """Each node starts its own rank, as without ssh. Nothing but the arguments tells the second one the schedule."""
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text((SCRIPTS / "loop.py").read_text())
    (tmp_path / "beside.py").touch()
    # DeepSpeed's launchers make it too, and on one machine one of two may find it half made
    (tmp_path / "logs").mkdir()
    node = (
        *(*PARTBOOK, "--hostfile", "hosts", "--no_ssh", "--master_addr", "localhost", "--master_port", free_port()),
        *("--schedule", "gpt2", "--no_local_rank", "--module", "--tp", 2, "--enable_each_rank_log", "logs"),
    )
    script = ("package.train", "--out", "out", "--deepspeed_config", config)
    launch_all([(*node, "--node_rank", number, *script) for number in range(2)], cwd=tmp_path)
    ranks = results(tmp_path / "out")
    assert_trained_as(alone, ranks)
    train = str(tmp_path / "package" / "train.py")
    for number, rank in enumerate(ranks):
        assert rank["sizes"] == [number, 2]
        assert rank["argv"] == [train, "--out", "out", "--deepspeed_config", str(config)]
        assert (rank["name"], rank["main"], rank["path"]) == ("__main__", True, str(tmp_path))
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_script_with_our_flags_trains_as_alone_until_a_rank_raises(
    alone: dict[str, Any], config: Path, tmp_path: Path
) -> None:
    """``add_schedule_arguments`` and ``initialize(args=...)`` under plain ``deepspeed``."""
    ended = launch(
        *(*DEEPSPEED, "--num_gpus", 2, "--master_port", free_port(), SCRIPTS / "own_flags.py", "--schedule", "gpt2"),
        *("--tp", 2, "--schedule-arg", "fuse_qkv=true", "--out", "out", "--deepspeed_config", config),
        cwd=tmp_path,
        code=1,
    )
    for rank in results(tmp_path / "out"):
        torch.testing.assert_close(rank["losses"], alone["explicit"]["losses"], rtol=1e-5, atol=0)
        assert rank["args"] == ["gpt2", 2, ["fuse_qkv=true"]]
        assert rank["c_attn"] == "Linear"
        assert rank["shapes"]["transformer.wte.weight"] == [99, 32]
        assert rank["shapes"]["transformer.h.0.attn.c_attn.weight"] == [32, 96]
    assert_shows_traceback(ended, "own_flags.py", "LookupError: rank 1 has had enough")


def assert_shows_traceback(ended: Finished, *parts: str) -> None:
    assert "Traceback (most recent call last)" in ended.output
    for part in parts:
        assert part in ended.output


def test_batches_that_differ_within_a_tp_group_end_the_job(tmp_path: Path) -> None:
    """Under torchrun, which is another launcher of the same module."""
    ended = launch(
        *("-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port(), *PARTBOOK),
        *("--schedule", "gpt2", "--tp", 2, SCRIPTS / "unequal.py"),
        cwd=tmp_path,
        code=1,
    )
    assert_shows_traceback(
        ended,
        "AgreementError: the ranks of one tp group must see the same batches, but argument ['input_ids'] differs",
        "(rank 0: [1, 12] int64 #",
        "hint: split the data over the 1 data-parallel ranks, not over all 2: DistributedSampler(dataset, "
        "num_replicas=1, rank=<global rank> // 2)",
    )


def trainer_alone(folder: Path, *arguments: object) -> dict[str, Any]:
    launch(*plain(SCRIPTS / "trainer.py", "--out", folder, *arguments), cwd=folder.parent)
    return results(folder)[0]


def assert_trainers_agree(expected: Path, found: Path) -> None:
    (alone,) = results(expected)
    for rank in results(found):
        torch.testing.assert_close(rank, alone, rtol=1e-4, atol=1e-4)
    for saved in (".", "checkpoint-3"):
        wanted, weights = (GPT2LMHeadModel.from_pretrained(run / saved).state_dict() for run in (expected, found))
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
    (expected_config, found_config) = (json.loads((folder / "config.json").read_text()) for folder in (expected, found))
    assert found_config == expected_config


def test_trainer_with_an_all_auto_config_trains_as_alone(tmp_path: Path) -> None:
    """Losses, gradient norms, metrics of samples that do not divide, the saved folder and a checkpoint on the way."""
    (tmp_path / "auto.json").write_text(json.dumps(ALL_AUTO))
    launch(
        *(*DEEPSPEED, "--num_gpus", 2, "--master_port", free_port(), "--module", PARTBOOK[-1], "--schedule", "gpt2"),
        *("--tp", 2, SCRIPTS / "trainer.py", "--deepspeed", "auto.json", "--out", "scheduled"),
        cwd=tmp_path,
    )
    alone = trainer_alone(tmp_path / "alone")
    assert len(alone["losses"]) == len(alone["norms"]) == 4
    assert_trainers_agree(tmp_path / "alone", tmp_path / "scheduled")


def test_trainer_under_zero_3_and_data_parallelism_trains_as_alone(tmp_path: Path) -> None:
    """tp 2 x dp 2. A model that zero.Init has partitioned, as from_config makes one then, is refused."""
    zero = {**ALL_AUTO["zero_optimization"], "stage": 3}  # type: ignore[dict-item]
    (tmp_path / "auto.json").write_text(json.dumps({**ALL_AUTO, "zero_optimization": zero}))
    ended = launch(
        *(*PARTBOOK, "--num_gpus", 4, "--master_port", free_port(), "--schedule", "gpt2", "--tp", 2),
        *(SCRIPTS / "trainer.py", "--deepspeed", "auto.json", "--evaluation-samples", 8, "--out", "scheduled"),
        cwd=tmp_path,
        code=1,
    )
    # the same samples in one step
    trainer_alone(tmp_path / "alone", "--micro-batch", 4, "--evaluation-samples", 8)
    assert_trainers_agree(tmp_path / "alone", tmp_path / "scheduled")
    assert_shows_traceback(
        ended,
        "PartbookError: the model's parameters are partitioned already (deepspeed.zero.Init)",
        "hint: build the model outside of zero.Init",
    )
