"""``build``: the rules that no primitive sees alone, and what the scheduled model says."""

import dataclasses

import pytest

import models
from partbook.core import Layout, Mesh, build, create_schedule
from partbook.core.weights import Source
from replays import assert_refused


def untied():
    return models.Toy(vocab=12, tied=False)


def column(sch):
    sch["up"].shard("weight", axis=0).shard("bias", axis=0)


def row(sch):
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def vocabulary(sch):
    sch["lm_head"].shard("weight", axis=0, pad=True)
    sch["transformer.wte"].sync("fwd_post", "all_reduce")


UNFINISHED = [
    (
        untied,
        lambda s: s["down"].shard("weight", axis=1),
        "down: its output is a partial sum that nothing reduces",
        'sync("fwd_post", "all_reduce")',
    ),
    (
        untied,
        lambda s: s["words"].shard("weight", axis=0),
        "words: its output is a partial sum that nothing reduces",
    ),
    (
        untied,
        lambda s: (row(s), s["down"].shard("bias", axis=0)),
        "down: the bias of a row-parallel module is added once, whole",
    ),
    (
        untied,
        lambda s: s["up"].shard("weight", axis=0),
        "up: its weight is split along the output, its bias is not",
    ),
    (
        untied,
        lambda s: s["up"].shard("weight", axis=0, segments=(8, 4)).shard("bias", axis=0),
        "up: weight and bias are split differently",
        "segments [8, 4]",
    ),
    (
        untied,
        lambda s: s["up"].shard("weight", axis=0).shard("bias", axis=0, replicas=2),
        "weight and bias are split differently",
        "2 replicas",
    ),
    (models.gpt2, vocabulary, "lm_head: its padded columns would win a part of the softmax", "shard_loss"),
]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("make", "setup", "message"), [(make, setup, text) for make, setup, *text in UNFINISHED])
def test_unfinished_schedule_is_refused_with_what_it_lacks(make, setup, message, tp):
    sch = create_schedule(make(), Mesh(tp=tp))
    setup(sch)
    assert_refused(sch, lambda s: build(s), "build(sch)", *message)


def test_every_unfinished_module_is_named_at_once():
    sch = create_schedule(models.Toy(tied=False), Mesh(tp=2))
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    error = assert_refused(sch, lambda s: build(s), "up: its weight", "down: its output")
    assert len(error.problems) == 2


@pytest.mark.parametrize(
    ("make", "setup"),
    [
        (untied, lambda s: (column(s), row(s))),
        (untied, lambda s: s["words"].shard("weight", axis=1).sync("fwd_post", "all_gather", axis=-1)),
        (models.gpt2, lambda s: (vocabulary(s), s.shard_loss("lm_head"))),
        (models.gpt2, lambda s: (vocabulary(s), s["lm_head"].sync("fwd_post", "all_gather", axis=-1))),
    ],
)
def test_finished_schedule_is_built(make, setup):
    sch = create_schedule(make(), Mesh(tp=2))
    setup(sch)
    assert build(sch).model is sch.module


def test_scheduled_model_says_what_a_dialect_needs():
    sch = create_schedule(models.Toy(vocab=12), Mesh(dp=2, tp=2, rank=3))
    column(sch)
    sch["words"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", axis=-1)
    sch["norm"].annotate("weight", "partial_gradient", True)
    scheduled = build(sch)
    assert scheduled.mesh == Mesh(dp=2, tp=2, rank=3)
    assert scheduled.layouts == {
        "up.weight": Layout(0, (12, 8), (12,), 2),
        "up.bias": Layout(0, (12,), (12,), 2),
        "words.weight": Layout(0, (12, 8), (12,), 2),
    }
    assert scheduled.ties == {"head.weight": "words.weight"}
    assert list(scheduled.weights) == [name for name, _ in scheduled.model.named_parameters()]
    assert set(scheduled.weights.values()) == {Source(name) for name in scheduled.weights}
    assert [sync.op for sync in scheduled.syncs["head"]] == ["all_gather"]
    assert scheduled.annotations == {"norm.weight": {"partial_gradient": True}}
    assert scheduled.history == sch.history
    assert scheduled.full_shape("words.weight") == (12, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheduled.mesh = Mesh()


def test_each_element_counts_on_one_rank_of_the_tp_group():
    """What a sum over the tp group, as of a gradient norm, needs: slices once each, replicated parameters once."""
    counted = {}
    for rank in range(4):
        sch = create_schedule(models.llama(), Mesh(tp=4, rank=rank))
        sch["model.layers.0.self_attn.k_proj"].shard("weight", axis=0, replicas=2)
        sch["model.layers.0.self_attn.q_proj"].shard("weight", axis=0)
        scheduled = build(sch)
        for name in (
            "model.norm.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ):
            counted.setdefault(name.split(".")[-2], []).append(scheduled.counts_here(name))
    assert counted == {
        "norm": [True, False, False, False],
        "k_proj": [True, False, True, False],
        "q_proj": [True, True, True, True],
    }
