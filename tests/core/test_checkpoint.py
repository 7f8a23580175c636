"""``checkpoint``: less memory, and not one bit of another gradient."""

import pytest
import torch

import models
from partbook.core import Mesh, create_schedule
from replays import assert_refused, assert_replays


def gradients(model, batch):
    torch.manual_seed(7)
    loss = model(**batch).loss
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_gradients_are_bitwise_the_same_with_dropout_on(make):
    # without the key-value cache, which copies keys and values: GPT-2's attention rounds copies and views differently
    batch = models.batch() | {"use_cache": False}
    loss, reference = gradients(make(dropout=0.3), batch)
    model = make(dropout=0.3)
    sch = create_schedule(model)
    for block in sch.select("transformer.h.*" if make is models.gpt2 else "model.layers.*"):
        block.checkpoint()
    calls = []
    model.get_submodule(block.path).register_forward_hook(lambda *_: calls.append("hook"))
    found_loss, found = gradients(model, batch)
    assert torch.equal(found_loss, loss)
    assert {name: torch.equal(found[name], reference[name]) for name in reference} == dict.fromkeys(reference, True)
    # a hook of the user's sees the module once, as without recomputation
    assert calls == ["hook"]
    # and dropout was on: another seed gives another loss
    torch.manual_seed(8)
    assert not torch.equal(model(**batch).loss, loss)
    assert_replays(sch_of(make, block.path), make())


def sch_of(make, path):
    sch = create_schedule(make())
    sch[path].checkpoint()
    return sch


def test_inner_activations_are_not_kept():
    """What the backward pass holds on to, measured; without recomputation it is several times as much."""

    def kept(checkpointed):
        model = models.gpt2()
        if checkpointed:
            for block in create_schedule(model).select("transformer.h.*"):
                block.checkpoint()
        sizes = []
        pack = lambda tensor: (sizes.append(tensor.numel()), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.transformer(models.batch()["input_ids"])
        return sum(sizes)

    assert kept(True) < kept(False) / 4


def test_recomputation_happens_in_training_only():
    model = models.Toy()
    sch = create_schedule(model)
    sch["up"].checkpoint()
    runs = []
    original = torch.nn.Linear.forward
    ids = torch.tensor([[1, 2]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: (runs.append(self), original(self, x))[1])
        model(ids).sum().backward()
        assert runs.count(model.up) == 2
        runs.clear()
        model.eval()(ids).sum().backward()
        assert runs.count(model.up) == 1


def test_generation_uses_the_cache_after_training():
    """Recomputing must not write a cache twice, and evaluation must not lose it."""
    torch.manual_seed(3)
    ids = models.batch(size=1)["input_ids"][:, :6]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    reference = models.llama().eval().generate(ids, **options)
    model = models.llama()
    for block in create_schedule(model).select("model.layers.*"):
        block.checkpoint()
    output = model(ids, labels=ids, use_cache=True)
    output.loss.backward()
    assert output.past_key_values.get_seq_length() == 0
    lengths = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    assert torch.equal(model.eval().generate(ids, **options), reference)
    # the prompt, then one token at a time
    assert lengths == [6, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpointing_twice_or_around_a_sharded_loss_is_refused(tp):
    sch = create_schedule(models.gpt2(), Mesh(tp=tp))
    sch["transformer.h.0"].checkpoint()
    assert_refused(sch, lambda s: s["transformer.h.0"].checkpoint(), "it is checkpointed already")
    sch["lm_head"].shard("weight", axis=0, pad=True)
    sch.shard_loss("lm_head")
    assert_refused(
        sch, lambda s: s.checkpoint(), "the model that holds a sharded loss cannot be checkpointed", "its blocks"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_sharding_the_loss_of_a_checkpointed_model_is_refused(tp):
    sch = create_schedule(models.gpt2(), Mesh(tp=tp)).checkpoint()
    sch["lm_head"].shard("weight", axis=0, pad=True)
    assert_refused(
        sch, lambda s: s.shard_loss("lm_head"), "the model is checkpointed as a whole", "checkpoint its blocks"
    )


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_prefix_in_the_cache_is_not_lost_in_training(make):
    """A cache that holds keys already was dropped like an empty one: as if the prefix had not been there."""
    prefix, ids = models.batch(size=2, length=6)["input_ids"], models.batch(size=2, length=7)["input_ids"]
    dense, model = make().train(), make().train()
    sch = create_schedule(model)
    for block in sch.select("transformer.h.*" if make is models.gpt2 else "model.layers.*"):
        block.checkpoint()
    for each in (model, dense):
        past = each.eval()(prefix, use_cache=True).past_key_values
        each.train()
        each.trained = each(ids, past_key_values=past, use_cache=True).logits
    torch.testing.assert_close(model.trained, dense.trained)
    assert not torch.allclose(dense.trained, dense(ids).logits, atol=1e-3)
