"""``decompose``: a linear is a product and a bias to the graphs around it, and itself to everybody else."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import blocks
import models
from blocks import FEED, assert_trains_like, batch, net, scheduled
from partbook.core import GuardError, Mesh, build, create_schedule, module
from replays import assert_refused, assert_replays

UP, DOWN = f"{FEED}.up", f"{FEED}.down"


def operations(node):
    """What the first graph does, in its order."""
    return [
        str(getattr(each.target, "__name__", each.target))
        for each in node.graphs()[0].nodes
        if each.op.startswith("call_")
    ]


@pytest.mark.parametrize("order", ["before trace", "after trace"])
def test_product_and_bias_are_operations_of_the_parent(order):
    sch = create_schedule(net())
    if order == "before trace":
        sch[UP].decompose()
    feed = sch[FEED].trace(inputs=batch())
    if order == "after trace":
        assert operations(feed)[0] == "up"
        sch[UP].decompose()
    assert operations(feed) == ["product", "add", "gelu", "down", "drop", "add", "norm"]
    assert_trains_like(sch, net(), batch())
    assert_trains_like(sch, net(), batch(length=9))
    assert_replays(sch, net())


def test_nothing_about_the_module_itself_changes():
    sch, feed = scheduled(FEED)
    weight, bias = feed.module.up.weight, feed.module.up.bias
    feed["up"].decompose()
    assert isinstance(feed.module.up, nn.Linear)
    assert type(feed.module.up).__name__ == "Linear"
    assert feed.module.up.weight is weight
    assert feed.module.up.bias is bias
    assert list(sch.module.state_dict()) == list(net().state_dict())
    assert "up: Linear  weight [12, 8]  bias [12]  decomposed" in str(sch)


def test_module_that_is_called_directly_adds_its_bias():
    _, feed = scheduled(FEED)
    feed["up"].decompose()
    x = batch()["x"]
    assert torch.equal(feed.module.up(x), net()[0].feed.up(x))
    assert torch.equal(copy.deepcopy(feed.module.up)(x), net()[0].feed.up(x))


def test_parent_without_a_graph_computes_the_same():
    sch = create_schedule(net())
    sch[UP].decompose()
    assert_trains_like(sch, net(), batch(), 0)
    assert_replays(sch, net())


def test_graph_further_out_still_calls_the_parent():
    sch = create_schedule(net())
    block = sch["0"].trace(inputs=batch())
    sch[UP].decompose()
    assert operations(block) == ["attn", "add", "feed"]
    assert_trains_like(sch, net(), batch())


def test_conv1d_is_decomposed_too():
    """transformers' Conv1D keeps its weight as (in, out)."""
    sch, dense = create_schedule(models.gpt2().double()), models.gpt2().double()
    mlp = sch["transformer.h.0.mlp"]
    mlp["c_fc"].decompose()
    mlp["c_proj"].decompose()
    assert operations(mlp) == ["product", "add", "act", "product", "add", "dropout"]
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(mlp.module(hidden), dense.transformer.h[0].mlp(hidden), rtol=0, atol=1e-12)
    assert_replays(sch, models.gpt2().double())


def test_patterns_see_the_product_as_the_operation_that_it_is():
    def linear(x, weight):
        return torch.nn.functional.linear(x, weight)

    def product(x, weight):
        return torch.matmul(x, weight)

    _, feed = scheduled(FEED)
    assert feed.find(linear) == []
    feed["up"].decompose()
    assert [match.nodes for match in feed.find(linear)] == [("product",)]
    mlp = create_schedule(models.gpt2())["transformer.h.0.mlp"]
    mlp["c_fc"].decompose()
    assert [match.nodes for match in mlp.find(product)] == [("product",)]


@pytest.mark.parametrize("order", ["shard first", "decompose first"])
def test_sharded_linear_keeps_its_shards_and_syncs(order):
    """Its numbers on two ranks: tests/distributed/test_graph_parity.py."""
    sch = create_schedule(net(), Mesh(tp=2))
    feed = sch[FEED].trace(inputs=batch())
    if order == "decompose first":
        feed["up"].decompose()
        feed["down"].decompose()
    feed["up"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    feed["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if order == "shard first":
        feed["up"].decompose()
        feed["down"].decompose()
    assert operations(feed) == ["product", "add", "gelu", "product", "add", "drop", "add", "norm"]
    product, _, gelu, _, added, *_ = (each for each in feed.graphs()[0].nodes if each.op.startswith("call_"))
    assert product.meta["val"].shape[-1] == gelu.meta["val"].shape[-1] == 6
    assert added.args[1].target == "down.bias"
    build(sch)
    assert_replays(sch, net())


def test_recomputed_and_decomposed_at_once():
    sch, feed = scheduled(FEED)
    feed["up"].decompose()
    feed["up"].checkpoint()
    assert_trains_like(sch, net(), batch())


def test_hook_that_is_put_on_it_later_is_called():
    """Or the call fails loudly: a hook must not be lost without a word."""
    sch, feed = scheduled(FEED)
    feed["up"].decompose()
    sch.module(**batch())
    seen = []
    feed.module.up.register_forward_hook(lambda module, args, output: seen.append(output))
    with contextlib.suppress(GuardError):
        sch.module(**batch())
        assert seen


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked(sch):
    sch[UP].module.register_forward_hook(lambda *_: None)


def hooked_before(sch):
    sch[UP].module.register_forward_pre_hook(lambda *_: None)


def hooked_backward(sch):
    sch[UP].module.register_full_backward_hook(lambda *_: None)


def without_bias(sch):
    sch[UP].module.bias = None


def decomposed(sch):
    sch[UP].decompose()


def recomputed(sch):
    sch[UP].checkpoint()


def odd(sch):
    sch[UP].module.__class__ = Odd


REFUSALS = [
    (None, lambda s: s[FEED].decompose(), "Feed is no linear", "nn.Linear and transformers' Conv1D are"),
    (None, lambda s: s[f"{FEED}.norm"].decompose(), "LayerNorm is no linear"),
    (odd, lambda s: s[UP].decompose(), "Odd is no linear"),
    (without_bias, lambda s: s[UP].decompose(), "it has no bias", "its product is all that it computes"),
    (decomposed, lambda s: s[UP].decompose(), "it is decomposed already"),
    (hooked, lambda s: s[UP].decompose(), "it has hooks, which would not be called any more", "remove them first"),
    (hooked_before, lambda s: s[UP].decompose(), "it has hooks, which would not be called any more"),
    (hooked_backward, lambda s: s[UP].decompose(), "it has hooks, which would not be called any more"),
    (recomputed, lambda s: s[UP].decompose(), "it is checkpointed", "checkpoint what is around it"),
]


@pytest.mark.parametrize(("setup", "call", "message"), [(setup, call, text) for setup, call, *text in REFUSALS])
def test_refused_decomposition_changes_nothing(setup, call, message):
    sch, _ = scheduled(FEED)
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def test_bias_fuses_with_what_follows():
    sch, feed = scheduled(FEED)
    assert feed.find(blocks.bias_gelu) == []
    feed["up"].decompose()
    feed.fuse(feed.match(blocks.bias_gelu), compiler=None)
    assert operations(feed) == ["product", "fused_add_gelu", "down", "drop", "add", "norm"]
    assert_trains_like(sch, net(), batch())


def test_decomposed_sibling_is_none_of_the_modules_that_a_pattern_calls():
    _, attn = scheduled()
    attn["q_proj"].decompose()
    assert attn.find(blocks.qkv) == []
    assert [match.nodes for match in attn.find(lambda x: module("*_proj")(x))] == [
        ("k_proj",),
        ("v_proj",),
        ("o_proj",),
    ]
