"""Dropout under tensor parallelism: which masks agree between ranks, and what recomputation replays."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
import partbook.dialects.deepspeed as on_deepspeed
from forks import forked, recomputed_inside
from partbook.core import ScheduledModel, consolidate, gradients
from partbook.dialects.pytorch import initialize
from ranks import on_ranks

SP = {"sequence_parallel": True}


def start(model: nn.Module, options: dict[str, Any], dialect: str = "pytorch") -> tuple[Any, ScheduledModel]:
    """(what to call, the scheduled model) at tp 2."""
    schedule = "gpt2" if "GPT2" in type(model).__name__ else "llama"
    if dialect == "pytorch":
        return initialize(model, schedule, options, tp=2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = on_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, schedule=schedule, schedule_args=options, tp=2
    )
    return engine, engine.scheduled


def masks_of(run: Any, scheduled: ScheduledModel) -> dict[str, Tensor]:
    """What each dropout of one forward pass set to zero, by module."""
    masks: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Eager attention gives its probabilities, after dropout, beside its output.
            probabilities = output[1] if isinstance(output, tuple) else output
            masks[name] = probabilities == 0
            if probabilities.ndim == 4:
                # Above the diagonal all are zero.
                masks[name] = masks[name][..., *torch.tril_indices(*probabilities.shape[-2:])]

        return hook

    handles = [
        module.register_forward_hook(record(name))
        for name, module in scheduled.model.named_modules()
        if isinstance(module, nn.Dropout) or name.endswith((".attn", ".self_attn"))
    ]
    run(**models.batch())
    for handle in handles:
        handle.remove()
    return masks


def agreement(masks: list[dict[str, Tensor]], one: int, other: int) -> dict[str, float]:
    """For each dropout, the share of equal decisions of two ranks: 1 if they agree, 1/2 if independent (p = 0.5)."""
    return {name: float((mask == masks[other][name]).float().mean()) for name, mask in masks[one].items()}


def everywhere(masks: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    all_masks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_masks, masks)
    return all_masks


REPLICATED = {"transformer.drop", *(f"transformer.h.{i}.{name}" for i in (0, 1) for name in
                                    ("attn.resid_dropout", "mlp.dropout"))}  # fmt: skip
HEADS = {f"transformer.h.{i}.attn" for i in (0, 1)}


def check_masks(masks: dict[str, Tensor], replicated: set[str], forked: set[str]) -> None:
    """On tp 2 x dp 2: ``replicated`` agree in a tp group, ``forked`` do not; dp ranks never do."""
    assert masks.keys() == replicated | forked
    all_masks = everywhere(masks)
    for name, mask in masks.items():
        assert 0.4 < mask.float().mean() < 0.6, name
    for first in (0, 2):
        within = agreement(all_masks, first, first + 1)
        assert {name for name, share in within.items() if share == 1} == replicated
        assert all(within[name] < 0.65 for name in forked), within
    for tp_rank in (0, 1):
        between = agreement(all_masks, tp_rank, 2 + tp_rank)
        assert all(share < 0.65 for share in between.values()), between
    # no two modules of one shape drop the same elements
    mine = list(masks.items())
    for i, (name, mask) in enumerate(mine):
        for other_name, other in mine[:i]:
            assert mask.shape != other.shape or (mask == other).float().mean() < 0.65, (name, other_name)


@pytest.mark.parametrize("dialect", ["pytorch", "deepspeed"])
@on_ranks(4)
def test_masks_agree_where_activations_do(rank, dialect):
    """Every rank seeds itself differently, as scripts that think of data parallelism do."""
    torch.manual_seed(100 + rank)
    run, scheduled = start(models.gpt2(dropout=0.5, seed=rank, attn_implementation="eager"), {}, dialect)
    check_masks(masks_of(run, scheduled), REPLICATED, HEADS)


@on_ranks(4)
def test_slices_of_the_sequence_have_masks_of_their_own(rank):
    """Under sequence parallelism only the embedding's dropout still acts on a replicated activation."""
    run, scheduled = start(models.gpt2(dropout=0.5, attn_implementation="eager"), SP)
    check_masks(masks_of(run, scheduled), {"transformer.drop"}, REPLICATED - {"transformer.drop"} | HEADS)


@pytest.mark.parametrize("options", [{}, {"fuse_qkv": True, **SP}])
@on_ranks(4)
def test_heads_of_a_llama_have_masks_of_their_own(rank, options):
    run, scheduled = start(models.llama(dropout=0.5, attn_implementation="eager"), options)
    check_masks(masks_of(run, scheduled), set(), {f"model.layers.{i}.self_attn" for i in (0, 1)})


@pytest.mark.parametrize("dialect", ["pytorch", "deepspeed"])
@on_ranks(4)
def test_weights_agree_although_every_rank_made_its_own(rank, dialect):
    wanted = models.gpt2(seed=0).state_dict()
    mine = models.gpt2(seed=rank)
    assert (rank == 0) == all(torch.equal(value, wanted[name]) for name, value in mine.state_dict().items())
    _, scheduled = start(mine, {}, dialect)
    for name, value in consolidate(scheduled).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt2", {}), ("gpt2", {"fuse_qkv": True, **SP}), ("llama", {}), ("llama", {"fuse_qkv": True, **SP})],
)
@on_ranks(2)
def test_recomputing_leaves_gradients_bitwise_the_same(rank, family, options):
    """Two steps: the random stream goes on from where it would be without recomputation."""
    found = {}
    for ratio, seed in [(0.0, 5), (0.5, 5), (1.0, 5), (1.0, 6)]:
        # a cache would make keys and values contiguous, which rounds differently: recomputed blocks have none
        model = getattr(models, family)(dropout=0.3, attn_implementation="eager", use_cache=False)
        torch.manual_seed(seed)
        _, scheduled = initialize(model, family, {**options, "checkpoint_ratio": ratio}, tp=2)
        for step in range(2):
            loss = model(**models.batch(seed=step)).loss
            loss.backward()
            found[ratio, seed, step] = {**gradients(scheduled), "loss": loss.detach()}
    for ratio in (0.5, 1.0):
        for step in range(2):
            for name, grad in found[0.0, 5, step].items():
                assert torch.equal(found[ratio, 5, step][name], grad), (ratio, step, name)
    # dropout was on: another seed gives other gradients
    assert not torch.equal(found[1.0, 6, 0]["loss"], found[1.0, 5, 0]["loss"])


@on_ranks(2)
def test_recomputing_inside_a_forked_region_replays_the_stream_around_it(rank):
    found = []
    for schedule in (forked, recomputed_inside):
        torch.manual_seed(5)
        model = models.gpt2(dropout=0.5)
        _, scheduled = initialize(model, schedule, tp=2)
        model(**models.batch()).loss.backward()
        found.append(gradients(scheduled))
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name


@on_ranks(2)
def test_evaluation_drops_nothing_and_leaves_the_random_stream_alone(rank):
    model = models.gpt2(dropout=0.5).eval()
    wanted = model(**models.batch()).loss
    initialize(model, "gpt2", tp=2)
    state = torch.get_rng_state()
    torch.testing.assert_close(model(**models.batch()).loss, wanted, rtol=1e-5, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
