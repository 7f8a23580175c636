"""``shard``: this rank's slice in the same parameter, the module's own sizes, and what cannot be split."""

import pytest
import torch
from torch import nn

import models
from partbook.core import Layout, Mesh, create_schedule
from replays import assert_refused, assert_replays


def toy(tp=2, rank=1, **options):
    return create_schedule(models.Toy(**options), Mesh(tp=tp, rank=rank))


@pytest.mark.parametrize(
    ("path", "param", "arguments", "local", "sizes"),
    [
        ("up", "weight", {"axis": 0}, (6, 8), {"in_features": 8, "out_features": 6}),
        ("up", "weight", {"axis": -1}, (12, 4), {"in_features": 4, "out_features": 12}),
        ("up", "bias", {"axis": 0}, (6,), {"out_features": 12}),
        ("up", "weight", {"axis": 0, "segments": (8, 2, 2)}, (6, 8), {"out_features": 6}),
        ("up", "weight", {"axis": 0, "replicas": 2}, (12, 8), {"out_features": 12}),
        ("words", "weight", {"axis": 0}, (5, 8), {"num_embeddings": 5, "embedding_dim": 8}),
        ("words", "weight", {"axis": 1}, (10, 4), {"num_embeddings": 10, "embedding_dim": 4}),
        ("norm", "weight", {"axis": 0}, (4,), {}),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_keeps_its_slice_in_the_same_parameter(path, param, arguments, local, sizes, rank):
    sch = toy(rank=rank, tied=False)
    parameter, full = sch[path].module.get_parameter(param), sch[path].module.get_parameter(param).detach().clone()
    sch[path].shard(param, **arguments)
    assert sch[path].module.get_parameter(param) is parameter
    assert tuple(parameter.shape) == local
    layout = sch.state.layouts[f"{path}.{param}"]
    assert torch.equal(parameter, layout.split(full, rank))
    # of its own: neither a view of the whole, nor sharing memory with it
    assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    assert {name: getattr(sch[path].module, name) for name in sizes} == sizes
    assert sch[path].is_sharded(param)
    assert_replays(sch, models.Toy(tied=False))


def test_slices_by_hand():
    """Against numbers that no code of ours has made."""
    for rank, rows in [(0, [0, 1, 4]), (1, [2, 3, 5])]:
        linear = nn.Linear(2, 6, bias=False)
        linear.weight.data = torch.arange(12.0).reshape(6, 2)
        sch = create_schedule(nn.Sequential(linear), Mesh(tp=2, rank=rank))
        sch["0"].shard("weight", axis=0, segments=(4, 2))
        assert linear.weight.tolist() == [[2.0 * row, 2.0 * row + 1] for row in rows]


def test_vocabulary_is_padded_with_zeros_where_it_does_not_divide():
    full = models.Toy(vocab=9).words.weight.detach()
    for rank, rows in enumerate([(0, 3), (3, 6), (6, 9), (9, 9)]):
        sch = toy(tp=4, rank=rank, vocab=9)
        sch["words"].shard("weight", axis=0, pad=True)
        weight = sch.module.words.weight
        assert torch.equal(weight, torch.cat([full[slice(*rows)], torch.zeros(3 - (rows[1] - rows[0]), 8)]))
        assert sch.state.layouts["words.weight"] == Layout(0, (9, 8), (9,), 4, padding=3)
        assert_replays(sch, models.Toy(vocab=9))


def test_tied_parameter_is_split_once_for_all_its_owners():
    sch = toy()
    sch["head"].shard("weight", axis=0)
    assert sch.module.head.weight is sch.module.words.weight
    assert (sch.module.head.out_features, sch.module.words.num_embeddings) == (5, 5)
    assert sch["words"].is_sharded("weight")
    assert not sch["up"].is_sharded("weight")
    assert not sch["up"].is_sharded("wait")
    assert_replays(sch, models.Toy())


@pytest.mark.parametrize("conv_axis", [0, 1])
def test_conv1d_keeps_its_weight_as_in_by_out(conv_axis):
    sch = create_schedule(models.gpt2(), Mesh(tp=2))
    fc = sch["transformer.h.0.mlp.c_fc"].shard("weight", axis=conv_axis)
    sizes = [(16, 128), (32, 64)][conv_axis]
    assert tuple(fc.module.weight.shape) == (fc.module.nx, fc.module.nf) == sizes
    assert_replays(sch, models.gpt2())


def test_frozen_and_meta_parameters_are_split_as_well():
    sch = create_schedule(models.on_meta(models.Toy), Mesh(tp=2))
    sch.module.up.weight.requires_grad_(False)
    weight = sch["up"].shard("weight", axis=0).module.weight
    assert weight.is_meta
    assert tuple(weight.shape) == (6, 8)
    assert not weight.requires_grad


def test_segments_may_be_given_as_a_list():
    """A list and a tuple are one value: the history reads back equal, and weight and bias are split alike."""
    sch = toy(tied=False)
    sch["up"].shard("weight", axis=0, segments=[8, 4]).shard("bias", axis=0, segments=(8, 4))
    assert sch.state.layouts["up.weight"].segments == sch.state.layouts["up.bias"].segments
    assert_replays(sch, models.Toy(tied=False))


def with_gradient(sch):
    sch.module.up.weight.grad = torch.zeros(12, 8)


REFUSALS = [
    (None, lambda s: s["up"].shard("wait", axis=0), "Linear has no parameter 'wait'", "did you mean 'weight'?"),
    (None, lambda s: s["act"].shard("weight", axis=0), "GELU has no parameter 'weight'", "there are none"),
    (None, lambda s: s["head"].shard("bias", axis=0), "Linear has no parameter 'bias'", "'weight'"),
    (None, lambda s: s.shard("up.weight", axis=0), "Toy has no parameter 'up.weight'"),
    (
        lambda s: s["up"].shard("weight", axis=0),
        lambda s: s["up"].shard("weight", axis=1),
        "up.weight is sharded already: dim 0 of [12, 8] over 2",
        "shard a parameter once",
    ),
    (
        lambda s: s["words"].shard("weight", axis=0),
        lambda s: s["head"].shard("weight", axis=0),
        "sch['head'].shard(param='weight', axis=0)",
        "words.weight is sharded already",
    ),
    (None, lambda s: s["up"].shard("weight", axis=2), "axis 2 is out of range for up.weight of shape [12, 8]"),
    (None, lambda s: s["up"].shard("bias", axis=-2), "axis -2 is out of range for up.bias of shape [12]"),
    (
        None,
        lambda s: s["up"].shard("weight", axis=0, segments=(4, 4)),
        "segments [4, 4] add up to 8",
        "up.weight is 12",
    ),
    (
        None,
        lambda s: s["up"].shard("weight", axis=0, segments=(9, 3)),
        "size 9 of axis 0",
        "one of [3, 9]",
        "size 3 of",
    ),
    (None, lambda s: s["up"].shard("weight", axis=0, segments=(16, -4)), "a segment of -4"),
    (None, lambda s: s["up"].shard("weight", axis=0, segments=(8, 4), pad=True), "only an unsegmented parameter"),
    (None, lambda s: s["up"].shard("weight", axis=0, replicas=3), "replicas=3 does not divide tp=2"),
    (None, lambda s: s["up"].shard("weight", axis=0, replicas=0), "replicas=0 does not divide tp=2"),
    (
        lambda s: s["up"].annotate("weight", "partial_gradient", True),
        lambda s: s["up"].shard("weight", axis=0),
        "up.weight has a partial gradient",
    ),
    (
        lambda s: s["down"].sync("bwd_post", "all_reduce"),
        lambda s: s["down"].shard("weight", axis=1),
        "'down' has a sync already, which was checked against the whole weight",
        "shard first, then sync",
    ),
    (
        lambda s: s["head"].sync("fwd_post", "all_gather", axis=1),
        lambda s: s["words"].shard("weight", axis=0),
        "'head' has a sync already",
    ),
    (
        with_gradient,
        lambda s: s["up"].shard("weight", axis=0),
        "weight holds a gradient of its full shape",
        "zero_grad",
    ),
]


@pytest.mark.parametrize(("setup", "call", "message"), [(setup, call, text) for setup, call, *text in REFUSALS])
def test_what_cannot_be_split_is_refused(setup, call, message):
    sch = toy()
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


@pytest.mark.parametrize(
    ("tp", "call", "message"),
    [
        (
            5,
            lambda s: s["up"].shard("weight", axis=0),
            ("size 12 of axis 0 of up.weight does not divide by tp=5", "tp could be one of [2, 3, 4, 6, 12]"),
        ),
        (
            3,
            lambda s: s["words"].shard("weight", axis=0),
            ("size 10 of axis 0 of words.weight does not divide by tp=3", "[2, 5, 10]"),
        ),
        (10, lambda s: s["up"].shard("bias", axis=0, replicas=2), ("does not divide by 5 slices (tp=10, replicas=2)",)),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_would(tp, call, message):
    assert_refused(toy(tp=tp), call, *message)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize("through", ["words", "head"])
def test_embedding_features_that_a_slice_cannot_honour_are_refused(option, through):
    [name] = option
    sch = toy(**option)
    message = f"the embedding 'words' uses {name}, which a slice cannot honour"
    assert_refused(sch, lambda s: s[through].shard("weight", axis=0), message)


class Scaled(nn.Embedding):
    """As some of transformers' embeddings: what it looks up is scaled."""

    def forward(self, ids):
        return super().forward(ids) * 4


def test_subclass_with_a_forward_of_its_own_is_refused():
    """A slice of it was looked up without the scale: wrong numbers, no error."""
    model = models.Toy(tied=False)
    model.words = Scaled(10, 8)
    sch = create_schedule(model, Mesh(tp=2))
    found = "'words', derived from Embedding, has its own forward: what a slice computes is not known"
    assert_refused(sch, lambda s: s["words"].shard("weight", axis=0), found, "replace it by modules that are known")
