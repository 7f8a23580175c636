"""``shard_loss``: the model's own loss on vocabulary shards; its numbers on several ranks are in tests/distributed."""

import pytest
import torch
from torch.nn import functional

import models
from partbook.core import Mesh, create_schedule
from partbook.core.loss import causal_lm_loss, vocabulary_parallel_cross_entropy
from replays import assert_refused, assert_replays


def split_head(sch, **options):
    sch["lm_head"].shard("weight", axis=0, pad=True, **options)
    return sch


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_loss_knows_this_ranks_columns(tp):
    """Vocabulary 99 on 8 ranks is 13 a rank: the last holds 8 real columns."""
    for rank in range(tp):
        sch = split_head(create_schedule(models.gpt2(), Mesh(tp=tp, rank=rank))).shard_loss("lm_head")
        step = -(-99 // tp)
        loss = sch.module.loss_function
        assert (loss.start, loss.size) == (rank * step, min(step, 99 - rank * step))
    assert sch.state.sharded_losses == ["lm_head"]
    assert_replays(sch, models.gpt2())


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(17)}])
def test_loss_and_gradient_on_one_rank_are_those_of_cross_entropy(options):
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 99, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 99, (2, 6))
    labels[0, 2:4] = -100
    loss = causal_lm_loss(logits, labels, vocab_size=99, **options)
    [grad] = torch.autograd.grad(loss, logits)
    total = functional.cross_entropy(logits[:, :-1].reshape(-1, 99), labels[:, 1:].reshape(-1), reduction="sum")
    reference = total / (17 if options else (labels[:, 1:] != -100).sum())
    torch.testing.assert_close(loss, reference, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(reference, logits)[0], rtol=1e-12, atol=1e-15)


def test_shifted_labels_of_the_caller_are_taken_as_they_are():
    logits, labels = torch.randn(1, 4, 9), torch.tensor([[1, 2, 3, -100]])
    expected = functional.cross_entropy(logits[0], labels[0])
    torch.testing.assert_close(causal_lm_loss(logits, None, 9, shift_labels=labels), expected)


def test_padded_columns_win_nothing_of_the_softmax():
    logits, targets = torch.randn(3, 8), torch.tensor([0, 4, 2])
    logits[:, 5:] = 50.0
    expected = functional.cross_entropy(logits[:, :5], targets, reduction="none")
    torch.testing.assert_close(vocabulary_parallel_cross_entropy(logits, targets, size=5), expected)


@pytest.mark.parametrize("label", [99, -1])
def test_label_outside_the_vocabulary_is_an_error_and_not_free(label):
    with pytest.raises(RuntimeError, match="a label lies outside the vocabulary of 99"):
        causal_lm_loss(torch.randn(1, 3, 99), torch.tensor([[0, label, 5]]), vocab_size=99)


def test_bfloat16_logits_are_reduced_in_float32():
    logits = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    loss = vocabulary_parallel_cross_entropy(logits, torch.tensor([0, 1, 62, 63]))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, functional.cross_entropy(logits.float(), torch.tensor([0, 1, 62, 63]), reduction="none")
    )
    loss.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("make", [models.bert, models.t5])
def test_a_forward_with_a_cross_entropy_of_its_own_keeps_it_on_one_rank(make):
    model, dense, batch = make(), make(), models.batch(padded=True)
    head = "cls.predictions.decoder" if make is models.bert else "lm_head"
    sch = create_schedule(model)
    sch[head].shard("weight", axis=0)
    sch.shard_loss(head, labels="same")
    assert sch.state.sharded_losses == [head]
    assert torch.equal(model(**batch).loss, dense(**batch).loss)
    assert_replays(sch, make())


class Delegating(models.GPT2LMHeadModel):
    """Asks for its loss through its parent's forward."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids, labels=labels, **kwargs)


def test_a_forward_may_ask_for_its_loss_through_its_parents():
    split_head(create_schedule(Delegating(models.gpt2().config), Mesh(tp=2))).shard_loss("lm_head")


WRONG_LABELS = [
    (models.gpt2, {"labels": "same"}, "the forward of GPT2LMHeadModel asks its loss_function", 'labels="next"'),
    (models.t5, {}, "the forward of T5ForConditionalGeneration does not ask its loss_function", 'labels="same"'),
    (models.t5, {"labels": "some"}, "no labels 'some'", "did you mean 'same'"),
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("make", "given", "message"), [(make, given, text) for make, given, *text in WRONG_LABELS])
def test_labels_that_are_not_the_models_are_refused(tp, make, given, message):
    sch = split_head(create_schedule(make(), Mesh(tp=tp)))
    assert_refused(sch, lambda s: s.shard_loss("lm_head", **given), *message)


def test_a_model_with_a_loss_of_its_own_is_not_checkpointed_as_a_whole():
    for tp in (1, 2):
        sch = split_head(create_schedule(models.t5(), Mesh(tp=tp))).shard_loss("lm_head", labels="same")
        assert_refused(sch, lambda s: s.checkpoint(), "the model that holds a sharded loss cannot be checkpointed")


REFUSALS = [
    (models.gpt2, None, "lm_hed", "it has no module 'lm_hed'", "'lm_head'"),
    (
        models.gpt2,
        None,
        "lm_head",
        "the weight of 'lm_head' is not split over the vocabulary",
        "shard it along its output",
    ),
    (models.gpt2, lambda s: s["lm_head"].shard("weight", axis=1), "lm_head", "is not split over the vocabulary"),
    (
        models.gpt2,
        lambda s: s["lm_head"].shard("weight", axis=1),
        "transformer.drop",
        "is not split over the vocabulary",
    ),
    (models.gpt2, lambda s: split_head(s).shard_loss("lm_head"), "lm_head", "the loss is sharded already"),
    (
        models.Toy,
        lambda s: s["head"].shard("weight", axis=0),
        "head",
        "Toy has no loss_function that takes labels",
        "transformers'",
    ),
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("make", "setup", "head", "message"), [(m, s, h, text) for m, s, h, *text in REFUSALS])
def test_loss_that_cannot_be_split_is_refused(tp, make, setup, head, message):
    sch = create_schedule(make(), Mesh(tp=tp))
    if setup:
        setup(sch)
    assert_refused(sch, lambda s: s.shard_loss(head), *message)


def test_segmented_head_is_refused():
    sch = create_schedule(models.gpt2(vocab=64), Mesh(tp=2))
    sch["lm_head"].shard("weight", axis=0, segments=(32, 32))
    assert_refused(sch, lambda s: s.shard_loss("lm_head"), "is not split over the vocabulary")
