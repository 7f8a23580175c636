"""BERT's and T5's options that act inside graphs: the numbers of the untouched model, and where they act."""

import pytest
import torch

import models
from partbook.core import apply_schedule, build, create_schedule
from partbook.schedules.graphs import T5, checkpoint_core, use_efficient_attention
from replays import assert_replays

EAGER = {"attn_implementation": "eager"}
ENCODER, DECODER = "encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"
CROSS = "decoder.block.0.layer.1.EncDecAttention"


def step(model, batch):
    """Loss and gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(model, dense, batches, **tolerance):
    for batch in batches:
        for training in (True, False):
            found, expected = step(model.train(training), batch), step(dense.train(training), batch)
            torch.testing.assert_close(found, expected, **tolerance)


def both_kinds(make):
    """With padding and without, of two lengths; a T5's decoder has other lengths than its encoder."""
    return [make(padded=True, length=16), make(padded=False, length=14)]


def verbs(sch, verb):
    return [step.path for step in sch.history if step.primitive.verb == verb]


def test_efficient_attention_of_bert_acts_with_padding_and_without():
    dense = models.bert(**EAGER).double()
    model = models.bert(**EAGER).double()
    sch = apply_schedule(create_schedule(model), "bert", {"efficient_attention": True, "fuse_qkv": True})
    attentions = [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]
    assert verbs(sch, "replace") == attentions + [path for path in attentions for _ in range(2)]
    for path in attentions:
        for graph in sch[path].graphs():
            [call] = [node for node in graph.nodes if "efficient_core_of_bert" in str(node.target)]
            assert len(call.args) in (6, 7)
    assert_replays(sch, models.bert(**EAGER).double())
    build(sch)
    for batch in both_kinds(models.batch):
        (loss, found), (wanted, expected) = step(model, batch), step(dense, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("config", [EAGER, {}])
def test_recomputed_core_of_bert_changes_not_one_bit(config):
    dense = models.bert(dropout=0.2, **config)
    sch = create_schedule(models.bert(dropout=0.2, **config))
    model = build(apply_schedule(sch, "bert", {"checkpoint_attention": True})).model
    for batch in both_kinds(models.batch):
        found, expected = step(model, batch), step(dense, batch)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


def test_own_efficient_attention_of_bert_is_left_alone():
    sch = apply_schedule(create_schedule(models.bert()), "bert", {"efficient_attention": True})
    assert verbs(sch, "replace") == []


def test_fused_activation_of_bert_gives_the_dense_models_numbers():
    model = models.bert().double()
    sch = apply_schedule(create_schedule(model), "bert", {"fuse_activation": True})
    assert verbs(sch, "fuse") == [f"bert.encoder.layer.{i}.intermediate" for i in (0, 1)]
    build(sch)
    assert_same(model, models.bert().double(), both_kinds(models.batch), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gated", [False, True])
def test_fused_activations_and_norms_of_t5_give_the_dense_models_numbers(gated):
    """With dropout: a compiled region draws the same masks."""
    model = models.t5(gated=gated, dropout=0.1, layers=1)
    sch = create_schedule(model)
    options = {"fuse_activation": True, "fuse_norm": True, "fuse_gate_up": gated}
    build(apply_schedule(sch, "t5", options))
    norms = [name for name, _ in model.named_modules() if name.endswith("layer_norm")]
    feeds = [f"{stack}.DenseReluDense" for stack in ("encoder.block.0.layer.1", "decoder.block.0.layer.2")]
    assert verbs(sch, "fuse") == feeds + norms
    dense = models.t5(gated=gated, dropout=0.1, layers=1)
    for batch in both_kinds(models.pair):
        (loss, found), (wanted, expected) = step(model, batch), step(dense, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("path", [ENCODER, DECODER, CROSS])
def test_efficient_attention_of_t5_keeps_the_position_bias_and_its_gradient(path):
    model = models.t5(layers=1, **EAGER).double()
    sch = create_schedule(model)
    use_efficient_attention(sch[path], T5)
    checkpoint_core(sch[path], T5)
    # a decoder's own attention is causal: it has a mask in every case
    kinds = 1 if path == DECODER else 2
    assert verbs(sch, "replace") == [path] * kinds
    assert verbs(sch, "checkpoint") == [path]
    build(sch)
    assert_same(model, models.t5(layers=1, **EAGER).double(), both_kinds(models.pair), rtol=1e-9, atol=1e-11)


def test_recomputed_core_of_t5_changes_not_one_bit():
    dense = models.t5(layers=1, dropout=0.2, **EAGER)
    model = models.t5(layers=1, dropout=0.2, **EAGER)
    sch = create_schedule(model)
    checkpoint_core(sch[ENCODER], T5)
    assert verbs(sch, "checkpoint") == [ENCODER] * 2
    build(sch)
    for batch in both_kinds(models.pair):
        found, expected = step(model, batch), step(dense, batch)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())
