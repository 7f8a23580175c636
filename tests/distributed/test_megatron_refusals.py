"""What the Megatron dialect refuses, with messages, and the weights that a provider fills a model with."""

import copy
import dataclasses
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_training as megatron
import models
from partbook import core
from partbook.core import AgreementError, ScheduleError
from partbook.dialects.megatron import (
    ConfigError,
    consolidate,
    model_provider,
    transformer_config,
)
from ranks import on_ranks


def meta(dense: nn.Module) -> Any:
    def build() -> nn.Module:
        with torch.device("meta"):
            return type(dense)(dense.config)

    return build


def chunks_of(dense: nn.Module, family: str, vp: int | None = None, **options: Any) -> list[Any]:
    return megatron.provide(model_provider(meta(dense), family, weights=dense, **options), vp)


def refused(call: Any, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    megatron.start(tp=2)
    dense = models.llama()

    def provide(**options: Any) -> Any:
        return lambda: chunks_of(dense, "llama", **options)

    refused(
        provide(config={"hidden_size": 64}), ConfigError,
        "hidden_size is 64 in Megatron's arguments, and 32 in the model: --hidden-size 32",
    )  # fmt: skip
    refused(provide(config={"num_layers": 3}), ConfigError, "num_layers is 3", "and 2 in the model: --num-layers 2")
    refused(provide(config={"num_query_groups": 4}), ConfigError, "num_query_groups is 4", "2 in the model")
    refused(provide(config={"hidden": 1}), ConfigError, "TransformerConfig has no field 'hidden'")
    refused(
        provide(config={"recompute_granularity": "selective"}), ConfigError, "recompute_granularity", "checkpoint_ratio"
    )
    odd = models.llama(num_attention_heads=1, kv_heads=1)
    refused(lambda: chunks_of(odd, "llama"), ConfigError, "1 attention heads, which do not divide by tp=2")
    config = transformer_config(dense.config)
    refused(
        provide(schedule_args={"sequence_parallel": True}, config=config), ConfigError,
        "the schedule splits the sequence, and Megatron's arguments do not", "--sequence-parallel",
    )  # fmt: skip
    other = dataclasses.replace(config, tensor_model_parallel_size=1)
    refused(provide(config=other), ConfigError, "tensor_model_parallel_size is 1, and the process groups are of 2")
    provider = model_provider(meta(dense), "llama", weights=dense)
    refused(lambda: provider(vp_stage=1), ConfigError, "vp_stage=1 was asked for", "in turn, from 0")


@on_ranks(1)
def test_sequence_parallelism_needs_tp(rank: int) -> None:
    megatron.start()
    dense = models.llama()
    words = "sequence parallelism splits the sequence over the tp ranks, and tp is 1"
    refused(lambda: chunks_of(dense, "llama", config={"sequence_parallel": True}), ConfigError, words)
    refused(lambda: chunks_of(dense, "llama", schedule_args={"sequence_parallel": True}), ConfigError, words)


@on_ranks(2)
def test_stages_that_do_not_fit_are_refused(rank: int) -> None:
    megatron.start(pp=2, vp=2)
    dense = models.llama(layers=3)
    refused(
        lambda: chunks_of(dense, "llama", 2), ConfigError, "3 layers do not divide into pp=2 x vp=2 = 4 stages",
        "vp could be one of",
    )  # fmt: skip
    cuts = "model.layers.0,model.layers.1"
    refused(lambda: chunks_of(dense, "llama", 2, cuts=cuts), ScheduleError, "2 cuts make 3 stages")
    mixed = dataclasses.replace(transformer_config(dense.config), batch_p2p_comm=True, overlap_p2p_comm=False)
    refused(lambda: chunks_of(dense, "llama", 2, config=mixed), ConfigError, "batch_p2p_comm", "pp=2")
    provider = model_provider(meta(models.llama(layers=4)), "llama", weights=0)
    refused(
        lambda: provider(pre_process=rank == 0, post_process=False), ConfigError, "ask for each by vp_stage, from 0"
    )
    # One rank alone is asked for what it is not; the others do not wait for it.
    refused(
        lambda: provider(pre_process=rank == 0, post_process=rank == 1, vp_stage=0), ConfigError,
        "rank 1: " if rank == 0 else "", "post_process=True was asked of stage 1, whose post_process is False",
        "is_pipeline_last_stage",
    )  # fmt: skip
    first = provider(pre_process=rank == 0, post_process=False, vp_stage=0)
    assert first.index == rank
    refused(lambda: provider(pre_process=True, post_process=False, vp_stage=1), ConfigError, "asked of stage")
    assert provider(pre_process=False, post_process=rank == 1, vp_stage=1).index == 2 + rank


@pytest.mark.parametrize("kind", ["context", "expert"])
@on_ranks(2)
def test_parallelism_without_a_rule_is_refused(rank: int, kind: str) -> None:
    megatron.start(**{{"context": "context_parallel_size", "expert": "expert_model_parallel_size"}[kind]: 2})
    refused(lambda: chunks_of(models.llama(), "llama"), ConfigError, f"{kind} parallelism over 2 ranks", "a size of 1")


@on_ranks(1)
def test_dropouts_that_differ_from_the_models_are_told(rank: int) -> None:
    megatron.start()
    dense = models.llama(dropout=0.25)
    derived = transformer_config(dense.config)
    assert (derived.attention_dropout, derived.hidden_dropout) == (0.25, 0.0)
    given = dataclasses.replace(derived, hidden_dropout=0.1)
    with pytest.warns(UserWarning, match=r"hidden_dropout is 0.1 in Megatron's arguments, and 0.0 in the model"):
        chunks_of(dense, "llama", config=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks_of(dense, "llama", config=derived)


@on_ranks(3)
def test_ties_that_megatron_does_not_sum_are_refused(rank: int) -> None:
    megatron.start(pp=3)
    dense = models.t5()
    refused(
        lambda: chunks_of(dense, "t5", cuts="encoder,decoder.block.0"), ScheduleError,
        "'shared.weight' is held by the stages [0, 1, 2]", "first and the last only",
    )  # fmt: skip


@on_ranks(2)
def test_calls_that_would_be_silently_wrong_are_refused(rank: int) -> None:
    megatron.start(pp=2)
    dense = models.gpt2()
    [stage] = chunks_of(dense, "gpt2")
    stage.eval()
    batch = models.batch(size=2, length=12, padded=True)
    refused(
        lambda: stage(batch["input_ids"], packed_seq_params=object()), ValueError, "packed_seq_params", "GPT2LMHead"
    )
    refused(lambda: stage(batch["input_ids"], colour=torch.ones(1)), ValueError, "'colour'")
    positions = torch.arange(12).repeat(2, 1)
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        if rank == 0:
            # As Megatron's loaders make them.
            plain = stage(batch["input_ids"], positions, mask)
            torch.testing.assert_close(plain, stage(batch["input_ids"]))
            restarted = torch.cat([torch.arange(6), torch.arange(6)]).repeat(2, 1)
            refused(lambda: stage(batch["input_ids"], restarted), RuntimeError, "start again inside a sequence")
            documents = mask.clone()
            documents[..., 6:, :6] = True
            refused(lambda: stage(batch["input_ids"], None, documents), RuntimeError, "not just causal")
        dist.barrier()


@pytest.mark.parametrize("with_mask", [0, 1])
@on_ranks(2)
def test_stages_that_are_called_with_different_entries_are_refused(rank: int, with_mask: int) -> None:
    megatron.start(pp=2)
    [stage] = chunks_of(models.gpt2(), "gpt2")
    batch = models.batch(size=2, length=12, padded=True)
    call = batch if rank == with_mask else {"input_ids": batch["input_ids"]}
    call = {name: value for name, value in call.items() if name != "labels"}
    if rank == 0:
        stage(**call)
    dist.barrier()
    if rank == 1:
        stage.set_input_tensor([torch.zeros(12, 2, 32)])
        mask, none = ("ids alone", "attention_mask") if with_mask else ("attention_mask", "ids alone")
        refused(
            lambda: stage(**call), AgreementError, f"the first stage was called with {mask}",
            f"stage 1 is called with {none}", "each stage the whole batch",
        )  # fmt: skip


@on_ranks(2)
def test_a_mask_that_comes_later_is_refused(rank: int) -> None:
    megatron.start(pp=2)
    [stage] = chunks_of(models.gpt2(), "gpt2")
    batch = models.batch(size=2, length=12, padded=True)
    if rank == 0:
        stage(batch["input_ids"])
        refused(
            lambda: stage(batch["input_ids"], None, batch["attention_mask"]), AgreementError,
            "stage 0 was called with ids alone, and stage 0 is now called with attention_mask", "a mask of ones",
        )  # fmt: skip


@on_ranks(2)
def test_weights_that_differ_between_ranks_are_refused(rank: int) -> None:
    megatron.start(pp=2)
    refused(
        lambda: chunks_of(models.gpt2(seed=rank), "gpt2"), AgreementError, "the ranks were given different weights",
        "of rank 1 is not that of rank 0", "seed all ranks alike",
    )  # fmt: skip
    provider = model_provider(meta(models.gpt2()), "gpt2", weights=rank)
    refused(lambda: megatron.provide(provider), AgreementError, "'the seed' of rank 1")


@on_ranks(1)
def test_what_only_megatrons_layers_have_is_refused_and_the_model_left(rank: int) -> None:
    megatron.start()
    dense = models.llama()
    provider = model_provider(lambda: dense, "llama", config={"mtp_num_layers": 1, "bf16": True})
    refused(lambda: megatron.provide(provider), ConfigError, "mtp_num_layers=1 is for Megatron's own layers")
    provider = model_provider(lambda: dense, "gpt2", config={"bf16": True})
    refused(lambda: megatron.provide(provider), ScheduleError, "'gpt2' is for GPT2LMHeadModel")
    assert {p.dtype for p in dense.parameters()} == {torch.float32}
    refused(lambda: megatron.provide(model_provider(lambda: dense, None)), ConfigError, "no schedule")


def test_without_megatron_core_the_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['megatron.core'] = None; import partbook.dialects.megatron"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert "pip install 'megatron-core>=" in found.stderr


@on_ranks(1)
def test_a_models_own_weights_are_used(rank: int) -> None:
    megatron.start()
    dense = models.gpt2()
    state = consolidate(megatron.provide(model_provider(lambda: copy.deepcopy(dense), "gpt2")))
    for name, value in dense.state_dict().items():
        assert torch.equal(state[name], value), name


@on_ranks(4)
def test_fresh_weights_do_not_depend_on_the_mesh(rank: int) -> None:
    """A seed's are those of one process; without one, rank 0's seed is everybody's."""
    megatron.start(tp=2, pp=2)
    build = meta(models.gpt2())
    for given, seed in ((5, 5), (None, 11)):
        torch.manual_seed(11 + rank)
        found = consolidate(megatron.provide(model_provider(build, "gpt2", weights=given)))
        wanted = core.consolidate(core.materialize(core.build(core.create_schedule(build())), seed))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
