"""What users pass to a scheduled model, right and wrong: it answers as the untouched one does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from partbook.core import gradients
from partbook.dialects.pytorch import initialize
from ranks import on_ranks

FAMILIES = [("gpt2", {}), ("llama", {"fuse_qkv": True, "fuse_gate_up": True}), ("llama", {"sequence_parallel": True})]


def both(family: str, options: dict[str, Any], **built_with: Any) -> tuple[nn.Module, nn.Module]:
    dense = getattr(models, family)(**built_with)
    model, _ = initialize(copy.deepcopy(dense), family, options, tp=2)
    return dense, model


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [64, 99])
@pytest.mark.parametrize("wrong_id", [-1, "vocab", "vocab + padding", 10**6])
@on_ranks(2)
def test_an_id_outside_the_vocabulary_raises_on_every_rank(rank, vocab, wrong_id):
    """It belongs to no rank's rows: without a check it would embed to zeros, or to a row of padding."""
    wrong = {"vocab": vocab, "vocab + padding": vocab + vocab % 2}.get(wrong_id, wrong_id)
    dense, model = both("gpt2", {}, vocab=vocab)
    batch = models.batch(vocab=vocab)
    batch["input_ids"][1, 2] = wrong
    with pytest.raises(IndexError):
        dense(**batch)
    with pytest.raises(RuntimeError, match=f"a token id lies outside the vocabulary of {vocab}"):
        model(**batch)


@pytest.mark.parametrize("wrong", [-1, 99, 10**6])
@on_ranks(2)
def test_a_label_outside_the_vocabulary_raises_on_every_rank(rank, wrong):
    dense, model = both("llama", {})
    batch = models.batch()
    batch["labels"][1, 2] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        dense(**batch)
    with pytest.raises(RuntimeError, match="a label lies outside the vocabulary of 99"):
        model(**batch)


@on_ranks(2)
def test_no_labels_that_count_give_nan_as_in_the_dense_model(rank):
    dense, model = both("gpt2", {})
    batch = models.batch()
    batch["labels"].fill_(-100)
    assert dense(**batch).loss.isnan()
    assert model(**batch).loss.isnan()


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@on_ranks(2)
def test_logits_are_whole_wherever_they_are_seen(rank, family, options):
    dense, model = both(family, options)
    batch = models.batch()
    ids = {"input_ids": batch["input_ids"]}
    for training in (True, False):
        dense.train(training)
        model.train(training)
        close(model(**ids).logits, dense(**ids).logits)
    in_eval, wanted = model(**batch), dense(**batch)
    close(in_eval.logits, wanted.logits)
    close(in_eval.loss, wanted.loss)
    model.train()
    in_training = model(**batch)
    assert in_training.logits is None
    assert "logits" not in in_training
    close(in_training.loss, wanted.loss)
    # the last positions only, as generation asks for them
    close(model(**ids, logits_to_keep=3).logits, dense(**ids, logits_to_keep=3).logits)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@on_ranks(2)
def test_every_way_to_ask_for_a_loss_gives_the_dense_one(rank, family, options):
    dense, model = both(family, options)
    batch, length = models.batch(), 16
    embedded = dense.get_input_embeddings()(batch["input_ids"]).detach()
    for more in [
        # what transformers' Trainer passes when it accumulates
        {"num_items_in_batch": torch.tensor(30)},
        {"num_items_in_batch": 30},
        {"shift_labels": batch["labels"].roll(-1, dims=1)},
        {"inputs_embeds": embedded, "input_ids": None},
        {"position_ids": torch.arange(3, 3 + length)[None]},
        {"attention_mask": torch.ones(4, 1, length, length).tril().bool()},
    ]:
        close(model(**{**batch, **more}).loss, dense(**{**batch, **more}).loss)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(**batch).loss, dense(**batch).loss, rtol=1e-3, atol=0)


@on_ranks(2)
def test_a_loss_of_the_users_own_on_whole_logits_trains_all_of_the_model(rank):
    """The gradient of gathered logits is each rank's own slice: it is not summed over the ranks that all have it."""
    dense = models.gpt2().double()
    model, scheduled = initialize(copy.deepcopy(dense), "gpt2", tp=2)
    ids = models.batch()["input_ids"]
    for each in (dense, model):
        each(input_ids=ids).logits.logsumexp(-1).square().mean().backward()
    found = gradients(scheduled)
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("family", "options"), FAMILIES[:2])
@on_ranks(2)
def test_a_tuple_is_returned_to_whom_asks_for_one(rank, family, options):
    dense, model = both(family, options)
    batch = {**models.batch(), "return_dict": False}
    loss, logits, *_ = model(**batch)
    close(loss, dense(**batch)[0])
    assert logits is None
    loss, logits, *rest = model.eval()(**batch)
    wanted = dense.eval()(**batch)
    close(loss, wanted[0])
    close(logits, wanted[1])
    assert len(rest) == len(wanted) - 2
    # positional, as some loops call it
    close(model(batch["input_ids"], return_dict=False)[0], wanted[1])


@pytest.mark.parametrize(("family", "options"), [*FAMILIES[:2], ("qwen2", {}), ("mistral", {})])
@on_ranks(2)
def test_greedy_generation_gives_the_dense_models_tokens(rank, family, options):
    """Through the key-value cache, which holds this rank's heads."""
    dense = getattr(models, family)()
    # far from ties between the best tokens
    with torch.no_grad():
        dense.get_output_embeddings().weight.mul_(8)
    schedule = family if family == "gpt2" else "llama"
    model, _ = initialize(copy.deepcopy(dense), schedule, options, tp=2)
    ids = models.batch(size=2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    wanted = dense.eval().generate(ids, attention_mask=mask, **settings)
    assert wanted.shape == (2, 26)
    assert torch.equal(model.eval().generate(ids, attention_mask=mask, **settings), wanted)


@on_ranks(2)
def test_odd_sequences_are_refused_under_sequence_parallelism_only(rank):
    dense, model = both("gpt2", {"sequence_parallel": True})
    odd = models.batch(length=15)
    with pytest.raises(ValueError, match="does not divide by 2 ranks; with sequence parallelism the sequence length"):
        model(**odd)
    _, model = both("gpt2", {})
    close(model(**odd).loss, dense(**odd).loss)


@on_ranks(2)
def test_two_backward_passes_add_up_and_frozen_parameters_get_nothing(rank):
    dense = models.llama().double()
    for frozen in (dense.model.embed_tokens, dense.model.layers[0].self_attn.q_proj):
        frozen.requires_grad_(False)
    model, scheduled = initialize(copy.deepcopy(dense), "llama", {"sequence_parallel": True}, tp=2)
    for each in (dense, model):
        for seed in (1, 2):
            batch = models.batch(seed=seed)
            each(**batch).loss.backward()
    found = gradients(scheduled)
    wanted = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        # transformers computes its loss in float32
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_torch_compile_takes_a_scheduled_model(rank):
    dense, model = both("llama", {"sequence_parallel": True, "fuse_qkv": True}, layers=1)
    # the first call also compares the batches of the ranks
    model(**models.batch())
    compiled = torch.compile(model, backend="aot_eager")
    for seed in (1, 2):
        batch = models.batch(seed=seed)
        wanted, loss = dense(**batch).loss, compiled(**batch).loss
        close(loss, wanted)
        loss.backward()
        wanted.backward()
    close(model.model.norm.weight.grad, dense.model.norm.weight.grad)
