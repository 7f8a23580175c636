"""``replace`` at a match: a function or a module in the place of some operations of one module's forward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import blocks
import models
from blocks import ATTENTION, FEED, QKV, assert_trains_like, batch, net, scheduled
from partbook.core import GuardError, Mesh, build, cat, consolidate, create_schedule, module, transpose
from replays import assert_replays, assert_unchanged

NAMES = ("q_proj", "k_proj", "v_proj")
PARTS = [f"{ATTENTION}.{name}" for name in NAMES]


def fuse_qkv(attn):
    return attn.replace(blocks.fused_qkv, at=attn.match(blocks.qkv), name="qkv", mapping=QKV)


def targets(graph):
    return [str(getattr(node.target, "__name__", node.target)) for node in graph.nodes if node.op.startswith("call_")]


# ---------------------------------------------------------------------------------------------------- numbers


def test_function_takes_the_place_of_the_match():
    sch, attn = scheduled()
    attn.replace(blocks.efficient, at=attn.match(blocks.core))
    for graph in attn.graphs():
        assert "efficient" in targets(graph)
        assert not {"matmul", "softmax", "dropout"} & set(targets(graph))
    assert_trains_like(sch, net(), batch())
    assert_trains_like(sch, net(), batch(length=9, seed=2))
    assert_replays(sch, net())


def test_function_is_what_runs():
    """The numbers above would be right as well if nothing was replaced."""
    sch, attn = scheduled()
    attn.replace(lambda q, k, v, mask, p, training: v * 2, at=attn.match(blocks.core))
    x = batch()["x"]
    projected = sch.module[0].attn.v_proj(x) * 2
    assert torch.equal(sch.module[0].attn(**batch()), sch.module[0].attn.o_proj(projected))


def test_siblings_become_one_module_that_takes_over_their_weights():
    sch, attn = scheduled()
    dense = net()
    fuse_qkv(attn)
    assert [name for name, _ in attn.module.named_children()] == ["o_proj", "qkv"]
    assert torch.equal(attn.module.qkv.weight, torch.cat([dense[0].attn.get_parameter(f"{n}.weight") for n in NAMES]))
    assert not attn.module.qkv.weight.is_meta
    assert sch.state.weights[f"{ATTENTION}.qkv.weight"] == cat([f"{part}.weight" for part in PARTS])
    for graph in attn.graphs():
        assert not set(NAMES) & set(targets(graph))
    # gradients by their original names
    assert_trains_like(sch, dense, batch())
    assert_trains_like(sch, dense, batch(length=9, seed=2))
    assert_replays(sch, net())


def test_state_dict_goes_back_to_the_original_names_bit_for_bit():
    sch, attn = scheduled()
    fuse_qkv(attn)
    found, wanted = consolidate(build(sch)), net().state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    fresh = net()
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(found)
    assert torch.equal(fresh(**batch()), net()(**batch()))


class Transposed(nn.Module):
    """Keeps its weight as (in, out) and gives q, k and v by themselves."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(24, 8, dtype=torch.float64, device="meta").t())
        self.bias = nn.Parameter(torch.empty(24, dtype=torch.float64, device="meta"))

    def forward(self, x):
        return (x @ self.matrix + self.bias).split(8, dim=-1)


def transposed(attention):
    return Transposed()


def test_new_module_may_keep_its_weights_in_another_way_and_return_a_tuple():
    sch, attn = scheduled()
    mapping = {"matrix": transpose(QKV["weight"]), "bias": QKV["bias"]}
    attn.replace(transposed, at=attn.match(blocks.qkv), name="qkv", mapping=mapping)
    assert_trains_like(sch, net(), batch())
    assert_replays(sch, net())


def test_instance_is_copied_in():
    sch, attn = scheduled()
    new = nn.Linear(8, 24, dtype=torch.float64)
    attn.replace(new, at=attn.match(blocks.qkv), name="qkv", mapping=QKV)
    assert attn.module.qkv is not new
    assert_trains_like(sch, net(), batch())
    with pytest.raises(ValueError, match="new is a Linear, which cannot be saved as text"):
        sch.history.to_json()


class Gelu(nn.Module):
    def forward(self, x):
        return functional.gelu(x)


def new_gelu(feed):
    return Gelu()


def gelu(x):
    return functional.gelu(x)


def test_module_without_weights_needs_no_mapping():
    sch, feed = scheduled(FEED)
    feed.replace(new_gelu, at=feed.match(gelu), name="act")
    assert isinstance(feed.module.act, Gelu)
    assert_trains_like(sch, net(), batch())
    assert_replays(sch, net())


def test_match_by_predicate_can_be_replaced():
    sch, feed = scheduled(FEED)
    [at] = feed.find(node=lambda node: node.target is torch._C._nn.gelu)
    feed.replace(functional.gelu, at=at)
    assert_trains_like(sch, net(), batch())


def test_lambda_is_refused_on_saving_only():
    sch, feed = scheduled(FEED)
    feed.replace(lambda x: functional.gelu(x), at=feed.match(gelu))
    with pytest.raises(ValueError, match="cannot be imported by that name"):
        sch.history.to_json()


def linear_gelu(x, weight, bias):
    return functional.gelu(functional.linear(x, weight, bias))


def slow_linear_gelu(x, weight, bias):
    return functional.gelu((x.unsqueeze(-2) * weight).sum(-1) + bias)


def test_function_that_takes_the_weights_of_a_child_leaves_them_where_they_are():
    sch, feed = scheduled(FEED)
    weight = feed.module.up.weight
    feed.replace(slow_linear_gelu, at=feed.match(linear_gelu))
    assert "up" not in targets(feed.graphs()[0])
    assert feed.module.up.weight is weight
    assert_trains_like(sch, net(), batch())
    assert list(sch.module.state_dict()) == list(net().state_dict())
    assert_replays(sch, net())


def test_copy_of_a_model_runs_on_weights_of_its_own():
    sch, attn = scheduled()
    fuse_qkv(attn)
    other = copy.deepcopy(sch.module)
    expected = net()(**batch())
    with torch.no_grad():
        attn.module.qkv.weight.zero_()
    torch.testing.assert_close(other(**batch()), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(sch.module(**batch()), expected)


# ------------------------------------------------------------------------------------------- training and evaluation


def drop_add_norm(x, residual, p, training, weight, bias):
    dropped = functional.dropout(x, p, training)
    return functional.layer_norm(dropped + residual, (8,), weight, bias, 1e-5)


CALLS = {
    "core": (ATTENTION, lambda node: node.replace(blocks.core, at=node.match(blocks.core))),
    "dropout, add, norm": (FEED, lambda node: node.replace(drop_add_norm, at=node.match(drop_add_norm))),
    "qkv": (ATTENTION, fuse_qkv),
}


@pytest.mark.parametrize("case", CALLS)
def test_dropout_acts_in_training_and_not_in_evaluation(case):
    path, call = CALLS[case]
    sch, node = scheduled(path, p=0.5)
    call(node)
    dense = net(p=0.5)
    for training in (True, False, True):
        sch.module.train(training)
        dense.train(training)
        # the same masks for the same seed
        assert_trains_like(sch, dense, batch())
    torch.manual_seed(7)
    assert not torch.allclose(sch.module(**batch()), dense.eval()(**batch()))


def fixed_rate(x, residual, weight, bias):
    return functional.layer_norm(functional.dropout(x, 0.5, True) + residual, (8,), weight, bias, 1e-5)


def test_pattern_that_says_training_matches_the_training_kind_only():
    """What replaces it is right for training, so evaluation must not get it."""
    sch, feed = scheduled(FEED, p=0.5)
    found = feed.match(fixed_rate)
    feed.replace(fixed_rate, at=found)
    dense = net(p=0.5)
    for training in (True, False, True):
        sch.module.train(training)
        dense.train(training)
        assert_trains_like(sch, dense, batch())


def test_changed_rate_of_a_replaced_dropout_is_not_ignored():
    """A dropout that is turned off after the schedule must not go on dropping."""
    sch, feed = scheduled(FEED, p=0.5)
    feed.replace(drop_add_norm, at=feed.match(drop_add_norm))
    dense = net(p=0.5)
    sch.module[0].feed.drop.p = dense[0].feed.drop.p = 0.0
    assert_trains_like(sch, dense, batch())


# ------------------------------------------------------------------------------------------------ new kinds of calls


def test_calls_of_a_new_kind_get_the_new_module_too():
    """It has the weights: the old way would have none."""
    sch, attn = scheduled(mask=False)
    fuse_qkv(attn)
    known = len(attn.graphs())
    assert_trains_like(sch, net(), batch())
    assert len(attn.graphs()) == known + 1
    assert all("qkv" in targets(graph) for graph in attn.graphs())


def test_calls_of_a_new_kind_without_the_match_run_as_before():
    """A function only makes a kind of call faster that has its pattern."""
    sch, attn = scheduled(mask=False)
    attn.replace(blocks.efficient_without_mask, at=attn.match(blocks.core_without_mask))
    assert_trains_like(sch, net(), batch())
    assert ["efficient_without_mask" in targets(graph) for graph in attn.graphs()] == [True, True, False]
    attn.replace(blocks.efficient, at=attn.match(blocks.core))
    assert_trains_like(sch, net(), batch())
    assert "efficient" in targets(attn.graphs()[-1])


def test_other_dtype_is_a_call_as_before():
    sch, attn = scheduled(dtype=torch.float32)
    fuse_qkv(attn)
    attn.replace(blocks.efficient, at=attn.match(blocks.core))
    sch.module.double()
    assert_trains_like(sch, net(dtype=torch.float32).double(), batch())


def test_autocast_after_the_replacement():
    sch, attn = scheduled(dtype=torch.float32)
    fuse_qkv(attn)
    given = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(dtype=torch.float32)(**given)
        found = sch.module(**given)
    assert torch.is_same_size(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------- key-value caches


def test_module_that_lost_parts_does_not_write_a_key_value_cache():
    model = models.llama().eval()
    sch = create_schedule(model)
    attn = sch["model.layers.0.self_attn"]
    mapping = {"weight": cat([f"{name}.weight" for name in NAMES])}
    attn.replace(nn.Linear(32, 64, bias=False), at=attn.match(blocks.qkv), name="qkv", mapping=mapping)
    ids = models.batch()["input_ids"]
    dense = models.llama().eval()
    torch.testing.assert_close(model(ids, use_cache=False).logits, dense(ids).logits)
    message = r"model.layers.0.self_attn: parts of it were replaced in its graph, which cannot write a key-value cache"
    with pytest.raises(GuardError, match=message) as error:
        model(ids)
    assert "hint: use_cache=False" in str(error.value)
    # training keeps none
    model.train()
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)


def causal(q, k, v):
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None, dropout_p=0.0, scale=8**-0.5, is_causal=True
    )


def attention_by_hand(q, k, v):
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def test_generation_with_a_cache_goes_on_where_nothing_was_taken_out():
    model, dense = models.gpt2().eval(), models.gpt2().eval()
    sch = create_schedule(model)
    for attn in sch.select("transformer.h.*.attn"):
        attn.replace(attention_by_hand, at=attn.match(causal))
    ids = models.batch(size=2)["input_ids"][:, :6]
    torch.testing.assert_close(model(ids, use_cache=False).logits, dense(ids).logits)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **arguments), dense.generate(ids, **arguments))


# ------------------------------------------------------------------------------------------- values that only leave


def eager_core(q, k, v, mask, p, training, dtype):
    probs = functional.softmax(torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5 + mask, dim=-1)
    probs = functional.dropout(probs.type(dtype), p, training)
    return torch.matmul(probs, v), probs


def efficient_core(q, k, v, mask, p, training, dtype):
    hidden = functional.scaled_dot_product_attention(q, k, v, mask, p if training else 0.0, scale=8**-0.5)
    return hidden, None


def test_value_that_only_leaves_the_module_may_become_none():
    model, dense = (models.gpt2(attn_implementation="eager") for _ in range(2))
    sch = create_schedule(model)
    attn = sch["transformer.h.0.attn"]
    attn.replace(efficient_core, at=attn.match(eager_core))
    given = models.batch(padded=True)
    torch.testing.assert_close(model(**given).logits, dense(**given).logits)
    x = torch.randn(2, 5, 32)
    found, wanted = (each.transformer.h[0].attn(x, attention_mask=torch.zeros(2, 1, 5, 5)) for each in (model, dense))
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] is None
    assert wanted[1] is not None
    assert_replays(sch, models.gpt2(attn_implementation="eager"))


# --------------------------------------------------------------------------------------------------- order of steps


def test_two_replacements_on_one_graph():
    sch, attn = scheduled()
    core = attn.match(blocks.core)
    fuse_qkv(attn)
    # found before the other step, and still there
    attn.replace(blocks.efficient, at=core)
    assert {"qkv", "efficient"} <= set(targets(attn.graphs()[0]))
    assert_trains_like(sch, net(), batch())
    assert_trains_like(sch, net(), batch(mask=False))
    assert_replays(sch, net())


def test_replaced_module_is_scheduled_like_any_other():
    sch, attn = scheduled(mesh=Mesh(tp=2))
    fuse_qkv(attn)
    attn["qkv"].shard("weight", axis=0, segments=(8, 8, 8)).shard("bias", axis=0, segments=(8, 8, 8))
    attn["qkv"].sync("bwd_post", "all_reduce")
    attn["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    [parts] = [node for node in attn.graphs()[0].nodes if "split_parts" in node.name]
    assert attn.module.qkv.weight.shape == (12, 8)
    # this rank's parts of q, k and v
    assert parts.args[1] == (4, 4, 4)
    dense = net()[0].attn
    assert torch.equal(attn.module.qkv.weight, torch.cat([dense.get_parameter(f"{n}.weight")[:4] for n in NAMES]))
    build(sch)
    assert_replays(sch, net())


def test_search_after_a_replacement_sees_the_new_module():
    sch, attn = scheduled()
    fuse_qkv(attn)
    assert attn.find(blocks.qkv) == []
    assert attn.match(lambda x: module("qkv")(x)).nodes == ("qkv",)
    assert_unchanged(sch, lambda: attn.find(blocks.core))
