"""A DeepSpeed config made concrete for a mesh: batch sizes, 'auto', and refusals with their numbers."""

from __future__ import annotations

import copy
import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from partbook.core import Mesh, PartbookError
from partbook.dialects.deepspeed import ConfigError
from partbook.dialects.deepspeed.config import load, resolve

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# 8 ranks, 4 of them data-parallel
MESH = Mesh(dp=4, tp=2)
# 4 * 2 * 3 = 24
RIGHT = {BATCH: 24, MICRO: 2, ACCUMULATION: 3}


def model(hidden: int | None = 32, dtype: torch.dtype = torch.float32) -> nn.Module:
    linear = nn.Linear(4, 4, dtype=dtype)
    linear.config = Namespace(hidden_size=hidden)  # type: ignore[assignment]
    return linear


def resolved(config: dict[str, Any], mesh: Mesh = MESH, args: Any = None, **options: Any) -> dict[str, Any]:
    return resolve(load(config, None), mesh, options.pop("model", model()), args, **options)


def batches(config: dict[str, Any]) -> tuple[int, int, int]:
    return config[BATCH], config[MICRO], config[ACCUMULATION]


def refusal(config: Any, mesh: Mesh = MESH, args: Any = None, **options: Any) -> str:
    """The message of the refusal; the config is as it was."""
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError) as caught:
        resolved(config, mesh, args, **options)
    assert config == before
    assert isinstance(caught.value, PartbookError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((BATCH, MICRO, ACCUMULATION), (24, 2, 3)),
        ((BATCH, MICRO), (24, 2, 3)),
        ((BATCH, ACCUMULATION), (24, 2, 3)),
        ((MICRO, ACCUMULATION), (24, 2, 3)),
        # what is not given is one accumulation step
        ((BATCH,), (24, 6, 1)),
        ((MICRO,), (8, 2, 1)),
    ],
)
def test_batch_sizes_follow_from_those_given_and_dp(given: tuple[str, ...], expected: tuple[int, int, int]) -> None:
    config = {key: RIGHT[key] for key in given}
    before = dict(config)
    assert batches(resolved(config)) == expected
    # 'auto' is as good as leaving it out
    assert batches(resolved({**dict.fromkeys(RIGHT, "auto"), **config})) == expected
    assert config == before


@pytest.mark.parametrize("given", [(), (ACCUMULATION,)])
def test_batch_sizes_that_say_nothing_are_refused(given: tuple[str, ...]) -> None:
    message = refusal({key: RIGHT[key] for key in given})
    assert message == f"the config gives neither {BATCH} nor {MICRO}"


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 8), (8, 1), (2, 4)])
def test_batch_size_counts_data_parallel_ranks_only(dp: int, tp: int) -> None:
    config = {MICRO: 2, ACCUMULATION: 3}
    assert batches(resolved(config, Mesh(dp=dp, tp=tp))) == (6 * dp, 2, 3)


def test_contradiction_for_all_ranks_says_what_they_were_written_for() -> None:
    # the config of a run without tp on the same 8 ranks
    message = refusal({**RIGHT, BATCH: 48})
    assert message == (
        "the batch sizes contradict each other: train_batch_size=48, but train_micro_batch_size_per_gpu=2 * "
        "gradient_accumulation_steps=3 * dp=4 = 24 (dp = 8 ranks / tp=2)\n"
        "  they were written for 8 data-parallel ranks\n"
        "  hint: train_batch_size=24, or gradient_accumulation_steps=6 to keep the batch; or leave one of the three out"
    )
    # what the hint says works
    assert batches(resolved({**RIGHT, BATCH: 24})) == (24, 2, 3)
    assert batches(resolved({**RIGHT, BATCH: 48, ACCUMULATION: 6})) == (48, 2, 6)


def test_contradiction_that_no_accumulation_mends_hints_at_none() -> None:
    message = refusal({**RIGHT, BATCH: 25})
    assert "train_batch_size=25, but" in message
    assert "they were written for" not in message
    assert message.endswith("hint: train_batch_size=24; or leave one of the three out")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({BATCH: 6}, "train_batch_size=6 does not divide by dp=4, so there is no train_micro_batch_size_per_gpu"),
        (
            {BATCH: 12, MICRO: 2},
            "train_batch_size=12 does not divide by train_micro_batch_size_per_gpu=2 * dp=4, "
            "so there is no gradient_accumulation_steps",
        ),
        (
            {BATCH: 20, ACCUMULATION: 3},
            "train_batch_size=20 does not divide by gradient_accumulation_steps=3 * dp=4, "
            "so there is no train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_batch_size_that_does_not_divide_is_refused(config: dict[str, int], message: str) -> None:
    assert refusal(config) == message


@pytest.mark.parametrize(("key", "value"), itertools.product(RIGHT, [0, -1, 2.0, "2", True]))
def test_batch_size_that_is_no_count_is_refused(key: str, value: Any) -> None:
    assert refusal({**RIGHT, key: value}) == f"{key} is {value!r}, not a positive integer"


def test_batch_size_over_all_ranks_is_put_right_where_it_was_computed_so() -> None:
    config = {**RIGHT, BATCH: 48}
    assert batches(resolved(config, world_batches=True)) == (24, 2, 3)
    assert config[BATCH] == 48
    # any other contradiction stays one
    assert "train_batch_size=25, but" in refusal({**RIGHT, BATCH: 25}, world_batches=True)


ALL_AUTO = {
    BATCH: "auto",
    MICRO: "auto",
    ACCUMULATION: "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "overlap_comm": "auto",
    },
}


def test_autos_take_the_values_of_training_arguments(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=0.5,
        learning_rate=7e-4,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-7,
        weight_decay=0.02,
        warmup_steps=5,
        max_steps=50,
        bf16=True,
        use_cpu=True,
        report_to=[],
    )
    assert resolved(ALL_AUTO, args=args) == {
        **RIGHT,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 7e-4, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.02, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 7e-4, "warmup_num_steps": 5, "total_num_steps": 50},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1024,
            "stage3_prefetch_bucket_size": 921,
            "stage3_param_persistence_threshold": 320,
        },
    }


def test_autos_without_a_source_are_left_to_deepspeed() -> None:
    config = {**ALL_AUTO, **RIGHT, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "weight_decay": "auto"}}}
    del config["scheduler"]
    found = resolved(config, model=model(hidden=None))
    assert found == {
        **RIGHT,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 3},
    }


@pytest.mark.parametrize("section", ["bf16", "bfloat16", "fp16"])
def test_auto_precision_is_that_of_the_model(section: str) -> None:
    dtype = torch.float16 if section == "fp16" else torch.bfloat16
    config = {**RIGHT, section: {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    assert resolved(config, model=model(dtype=dtype))[section] == {"enabled": True}
    assert resolved(config)[section] == {"enabled": False}


@pytest.mark.parametrize(
    ("path", "config"),
    [
        ("optimizer.params.lr", {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}),
        ("scheduler.params.warmup_max_lr", {"scheduler": {"params": {"warmup_max_lr": "auto"}}}),
        ("scheduler.params.total_num_steps", {"scheduler": {"params": {"total_num_steps": "auto"}}}),
    ],
)
def test_auto_that_only_the_user_knows_is_refused(path: str, config: dict[str, Any]) -> None:
    wanted = f"{path} is 'auto', but nothing says its value\n  hint: give a number"
    assert refusal({**RIGHT, **config}) == wanted


def test_number_of_steps_that_training_arguments_leave_to_the_epochs_is_refused(tmp_path: Path) -> None:
    """max_steps=-1 became total_num_steps: a schedule that ends before it begins."""
    args = transformers.TrainingArguments(str(tmp_path), num_train_epochs=3, report_to=[])
    config = {**RIGHT, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    assert "scheduler.params.total_num_steps is 'auto', but nothing says" in refusal(config, args=args)


def test_autotp_beside_a_schedule_is_refused() -> None:
    assert refusal({**RIGHT, "tensor_parallel": {"autotp_size": 2}}) == (
        "the config asks for DeepSpeed's own AutoTP (tensor_parallel.autotp_size=2), and the schedule splits the model "
        "over tp=2 itself\n  hint: remove tensor_parallel from the config, or the schedule"
    )
    assert resolved({**RIGHT, "tensor_parallel": {"autotp_size": 1}})[BATCH] == 24


def test_sequence_parallel_size_is_refused() -> None:
    assert refusal({**RIGHT, "sequence_parallel_size": 2}).startswith("sequence_parallel_size (Ulysses) cannot")


@pytest.mark.parametrize("section", ["bf16", "bfloat16", "fp16"])
@pytest.mark.parametrize("zero", [{}, {"zero_optimization": {"stage": 0}}, {"zero_optimization": False}])
def test_low_precision_without_zero_is_refused(section: str, zero: dict[str, Any]) -> None:
    config = {**RIGHT, section: {"enabled": True}}
    message = refusal({**config, **zero})
    assert message.startswith(f"{section} with ZeRO stage 0 trains wrongly in DeepSpeed")
    assert '"zero_optimization": {"stage": 1}' in message
    # what the hint says works, and DeepSpeed's old form of it
    assert resolved({**config, "zero_optimization": {"stage": 1}})[section] == {"enabled": True}
    assert resolved({**config, "zero_optimization": True})[section] == {"enabled": True}


def test_low_precision_that_auto_turns_on_is_refused_too() -> None:
    config = {**RIGHT, "bf16": {"enabled": "auto"}}
    assert refusal(config, model=model(dtype=torch.bfloat16)).startswith("bf16 with ZeRO stage 0")


@pytest.mark.parametrize("config", [None, "mixed", {"optimizer": {"type": "AdamW"}}])
def test_adam_is_not_compiled_on_a_cpu(config: Any) -> None:
    optimizer = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}} if config is None else config
    if config == "mixed":
        optimizer = {"optimizer": {"type": "Adam", "params": {"torch_adam": False}}}
    found = resolved({**RIGHT, **optimizer})["optimizer"]["params"]["torch_adam"]
    # what the user says stays
    assert found is (config != "mixed")


HJSON = """
{
  # a comment, as DeepSpeed allows
  "train_micro_batch_size_per_gpu": 2,  // and another one
  "gradient_accumulation_steps": 3
}
"""


def test_config_is_read_from_a_dict_a_path_and_args(tmp_path: Path) -> None:
    path = tmp_path / "ds_config"
    path.write_text(HJSON)
    expected = {MICRO: 2, ACCUMULATION: 3}
    for config, args in [
        (expected, None),
        (path, None),
        (str(path), None),
        (None, Namespace(deepspeed_config=str(path))),
        (None, Namespace(deepspeed_config=expected)),
        (None, Namespace(deepspeed_config=None, deepscale_config=str(path))),
        (expected, Namespace(deepspeed_config=None)),
        (expected, Namespace()),
    ]:
        assert load(config, args) == expected
    assert path.read_text() == HJSON


def test_config_dict_of_the_user_is_never_changed() -> None:
    config = copy.deepcopy({**ALL_AUTO, **RIGHT, BATCH: 48})
    del config["scheduler"]
    before = copy.deepcopy(config)
    args = Namespace(learning_rate=0.1, adam_beta1=0.9, adam_beta2=0.99)
    changed = resolved(config, args=args, world_batches=True)
    assert config == before
    assert changed["optimizer"]["params"]["lr"] == 0.1


@pytest.mark.parametrize("in_args", ["deepspeed_config", "deepscale_config"])
def test_config_that_is_passed_twice_is_refused(in_args: str) -> None:
    with pytest.raises(ConfigError, match=r"passed twice: as config= and as args\.deepspeed_config"):
        load(RIGHT, Namespace(**{in_args: RIGHT}))


def test_no_config_is_refused() -> None:
    for args in (None, Namespace(), Namespace(deepspeed_config=None)):
        with pytest.raises(ConfigError, match=r"no DeepSpeed config: pass config= .* or --deepspeed_config FILE"):
            load(None, args)


@pytest.mark.parametrize("name", ["ds.json", "ds_config", "configs/ds.hjson"])
def test_config_file_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(name, None)
    assert str(caught.value) == f"there is no DeepSpeed config {name!r} (looked in {tmp_path})"


@pytest.mark.parametrize(
    ("content", "reason"),
    [('{"a": 1, "a": 2}', "Duplicate keys"), ('{"a": ', "cannot be read"), ("[1, 2]", "holds no keys and values")],
)
def test_config_file_that_is_no_config_is_named(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load(path, None)
    assert str(path) in str(caught.value)
    assert path.read_text() == content
