"""The running example on one process: after each step, loss, gradients and outputs of the untouched model."""

import pytest
import torch
from transformers import DynamicCache

import models
import running_example as example
from partbook.core import GuardError, Mesh, ScheduleError, build, consolidate, create_schedule, gradients
from replays import assert_refused, assert_replays

PATH = "bert.encoder.layer.1.attention"


def assert_computes_the_same(sch, training=(True, False)):
    """Forward and backward, for both kinds of call."""
    untouched = example.model()
    for mode in training:
        sch.module.train(mode)
        untouched.train(mode)
        for batch in example.batches():
            sch.module.zero_grad()
            untouched.zero_grad()
            found, wanted = sch.module(**batch), untouched(**batch)
            torch.testing.assert_close(found.loss, wanted.loss, rtol=0, atol=1e-12)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)
            found.loss.backward()
            wanted.loss.backward()
            grads = gradients(build(sch))
            assert grads.keys() == dict(untouched.named_parameters()).keys()
            for name, parameter in untouched.named_parameters():
                torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    sch.module.train()


def names(graph, op="call_module"):
    return [node.target for node in graph.nodes if node.op == op]


def test_each_step_computes_what_the_untouched_model_does():
    sch = create_schedule(example.model())
    attn = sch[PATH]["self"].trace()
    assert len(attn.graphs()) == 4
    assert_computes_the_same(sch)

    example.fuse_qkv(attn)
    assert [names(graph) for graph in attn.graphs()] == [["qkv"]] * 4
    assert [name for name, _ in attn.module.named_children()] == ["dropout", "qkv"]
    assert_computes_the_same(sch)

    example.use_efficient_attention(attn)
    for graph in attn.graphs():
        assert torch.nn.functional.softmax not in names(graph, "call_function")
        assert example.efficient in names(graph, "call_function")
    assert_computes_the_same(sch)

    sch.module.zero_grad()
    example.split(sch[PATH])
    assert_computes_the_same(sch)


def test_tree_shows_every_step():
    sch = create_schedule(models.on_meta(example.model().__class__, config=example.model().config), Mesh(tp=2, rank=1))
    example.schedule(sch)
    lines = [line.strip() for line in str(sch[PATH]).splitlines()]
    replaced = "qkv by qkv  masked by efficient  unmasked by efficient"
    assert lines[1] == f"self: BertSelfAttention  traced  {replaced}  forked rng"
    assert "qkv: Linear  weight [48, 32] (dim 0 of [96, 32] over 2, segments [32, 32, 32])  bias [48]" in lines[3]
    assert "dense: Linear  weight [32, 16] (dim 1 of [32, 32] over 2)  bias [32]  sync(" in lines[5]
    # the graphs are made again with what this rank has
    [split] = [node for node in sch[PATH]["self"].graphs()[0].nodes if node.name == "split_parts"]
    assert split.args[1] == (16, 16, 16)
    build(sch)


def test_state_dict_goes_back_to_three_projections():
    sch = create_schedule(example.model())
    example.schedule(sch)
    state = consolidate(build(sch))
    wanted = example.model().state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_history_is_saved_and_replayed():
    sch = create_schedule(example.model())
    example.schedule(sch)
    assert_replays(sch, example.model())


def test_attention_weights_become_none():
    sch = create_schedule(example.model())
    attn = sch[PATH]["self"]
    example.use_efficient_attention(attn)
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    assert attn.module(hidden)[1] is None
    assert example.model().get_submodule(attn.path)(hidden)[1] is not None
    # transformers leaves out what is None
    assert len(sch.module(**example.batches()[1], output_attentions=True).attentions) == 1


def test_pattern_without_the_attention_weights_is_told_that_they_are_used():
    def product(q, k, v, scale, p, training, mask):
        return example.masked(q, k, v, scale, p, training, mask)[0]

    sch = create_schedule(example.model())
    attn = sch[PATH]["self"].trace()
    with pytest.raises(
        ScheduleError, match=r"7 of 7 operations: the intermediate value %dropout is also used by %output"
    ):
        attn.match(product)


def test_one_kind_of_call_may_stay_as_it_is():
    sch = create_schedule(example.model())
    attn = sch[PATH]["self"]
    attn.replace(example.efficient, at=attn.match(example.masked))
    calls = [example.efficient in names(graph, "call_function") for graph in attn.graphs()]
    assert calls == [True, True, False, False]
    assert_computes_the_same(sch)


def test_wrong_order_is_refused():
    """A replaced projection must be whole, and what is taken away needs a place for its weights."""
    sch = create_schedule(example.model(), Mesh(tp=2))
    attn = sch[PATH]["self"].trace()
    assert_refused(sch, lambda s: s[PATH]["self"].replace(lambda x: (x, x, x), at=attn.match(example.qkv)), "query")
    for name in ("query", "key", "value"):
        attn[name].shard("weight", axis=0).shard("bias", axis=0)
    match = attn.match(example.qkv)
    refused = assert_refused(
        sch, lambda s: s[PATH]["self"].replace(example.fused, at=match, name="qkv"), "query.weight"
    )
    assert "replace before shard" in str(refused)


def test_kind_of_call_that_lost_its_projections_is_refused_when_it_comes():
    """A key-value cache is written by the module's own forward, whose projections are gone."""
    sch = create_schedule(example.model())
    attn = sch[PATH]["self"]
    example.fuse_qkv(attn)
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(GuardError, match="key-value cache"):
        attn.module.eval()(hidden, cache=DynamicCache())
