"""The options that act inside graphs: the numbers of the untouched model, what is recomputed, and what is refused."""

import copy

import pytest
import torch
from torch.nn import functional

import models
from partbook.core import Mesh, apply_schedule, build, create_schedule
from partbook.schedules.graphs import core_of_llama, efficient_core
from replays import assert_replays

FAMILIES = ("gpt2", "llama", "mistral", "qwen2")
EAGER = {"attn_implementation": "eager"}


def schedule_of(name):
    return "gpt2" if name == "gpt2" else "llama"


def scheduled(name, options, tp=1, **config):
    sch = create_schedule(getattr(models, name)(**config), Mesh(tp=tp))
    apply_schedule(sch, schedule_of(name), options)
    return sch


def step(model, batch):
    """Loss, outputs and gradients; the loss in the logits' own precision."""
    torch.manual_seed(0)
    model.zero_grad()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(model, dense, batch, **tolerance):
    found, expected = step(model, batch), step(dense, batch)
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_activation_gives_the_dense_models_numbers(name):
    model = build(scheduled(name, {"fuse_activation": True})).model.double()
    dense = getattr(models, name)().double()
    for training in (True, False):
        for length in (16, 11):
            batch = models.batch(length=length, padded=True)
            assert_same(model.train(training), dense.train(training), batch, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fused_norms_give_the_dense_models_numbers(name):
    sch = scheduled(name, {"fuse_norm": True})
    assert [step.path for step in sch.history if step.primitive.verb == "fuse"][-1] == "model.norm"
    assert_same(build(sch).model, getattr(models, name)(), models.batch(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_efficient_attention_gives_the_dense_models_numbers(name):
    """Right padding only: of rows without any key, eager and efficient attention make different numbers by design."""
    batch = models.batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -3:] = 0
    sch = scheduled(name, {"efficient_attention": True}, **EAGER)
    assert sum(step.primitive.verb == "replace" for step in sch.history) == 2
    assert_same(build(sch).model, getattr(models, name)(**EAGER), batch, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_efficient_attention_of_rows_without_keys_is_that_of_transformers(name):
    batch = models.batch(padded=True)
    assert (batch["attention_mask"][:, 0] == 0).any()
    model = build(scheduled(name, {"efficient_attention": True}, **EAGER)).model
    assert_same(model, getattr(models, name)(), batch, rtol=1e-3, atol=1e-3)


def test_masking_every_key_with_the_lowest_number_would_give_another_gradient():
    """What ``efficient_core`` avoids: rows of a mask that are all padding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 0, :] = torch.finfo(torch.float32).min

    def gradient(core):
        value = v.clone().requires_grad_()
        core(q, k, value, mask, 0.5, 0.0, True, torch.float32)[0][:, :, 0].sum().backward()
        return value.grad

    def careless(q, k, v, mask, scale, p, training, dtype):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None

    # the weights of a row add up to 1, or there are none: 2 heads of 8
    assert gradient(core_of_llama).sum() == pytest.approx(16, rel=1e-4)
    assert gradient(efficient_core).abs().sum() == 0
    assert gradient(careless).sum() == pytest.approx(64, rel=1e-4)


def test_own_efficient_attention_is_left_alone():
    sch = scheduled("llama", {"efficient_attention": True})
    assert not any(step.primitive.verb == "replace" for step in sch.history)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("config", [EAGER, {}])
def test_recomputed_core_changes_nothing(name, config):
    dense = getattr(models, name)(dropout=0.2, **config)
    model = build(scheduled(name, {"checkpoint_attention": True}, dropout=0.2, **config)).model
    found, expected = step(model, models.batch(padded=True)), step(dense, models.batch(padded=True))
    # The eager model's keys go through a cache and lie in memory otherwise: some processors add in another order.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-6)


def test_recomputed_core_keeps_less():
    def kept(model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            model(**models.batch(length=32))
        return sum(sizes)

    whole = kept(models.llama(**EAGER))
    core = kept(build(scheduled("llama", {"checkpoint_attention": True}, **EAGER)).model)
    block = kept(build(scheduled("llama", {"checkpoint_ratio": 1.0}, **EAGER)).model)
    assert block < core < 0.8 * whole


def test_only_blocks_that_are_not_recomputed_have_their_core_recomputed():
    sch = scheduled("gpt2", {"checkpoint_ratio": 0.5, "checkpoint_attention": True}, layers=4)
    steps = [(step.path, step.primitive.at is not None) for step in sch.history if step.primitive.verb == "checkpoint"]
    blocks = [path for path, in_graph in steps if not in_graph]
    cores = [path for path, in_graph in steps if in_graph]
    assert blocks == ["transformer.h.1", "transformer.h.3"]
    assert cores == ["transformer.h.0.attn", "transformer.h.2.attn"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_all_options_together_replay_and_copy(name):
    options = {"fuse_activation": True, "efficient_attention": True, "checkpoint_attention": True}
    options |= {"fuse_norm": True, "fuse_qkv": True, "fuse_gate_up": True} if name == "llama" else {"fuse_qkv": True}
    sch = scheduled(name, options, **EAGER)
    assert_replays(sch, getattr(models, name)(**EAGER))
    model = build(sch).model
    copied = copy.deepcopy(model)
    batch = models.batch()
    assert_same(copied, model, batch, rtol=0, atol=0)
    with torch.no_grad():
        copied.get_output_embeddings().weight.zero_()
    assert not torch.equal(copied(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_the_cache_gives_the_dense_models_tokens(name):
    ids = models.batch(size=2)["input_ids"][:, :6]
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options = {"fuse_activation": True, "efficient_attention": True, "checkpoint_attention": True}
    model = build(scheduled(name, options, **EAGER)).model.eval()
    assert torch.equal(
        model.generate(ids, **arguments), getattr(models, name)(**EAGER).eval().generate(ids, **arguments)
    )


def test_unknown_activation_code_is_refused_with_the_nearest_miss():
    model = models.gpt2()
    model.transformer.h[1].mlp.act = torch.nn.Identity()
    model.transformer.h[1].mlp.other = model.transformer.h[1].mlp.act
    sch = create_schedule(model)
    sch["transformer.h.1.mlp"].replace(Squared.of)
    with pytest.raises(ValueError, match=r"sch\['transformer.h.1.mlp'\].match\(bias_then_activation\)[\s\S]*no match"):
        apply_schedule(sch, "gpt2", {"fuse_activation": True})


class Squared(torch.nn.Module):
    """A feed-forward whose bias is not followed by a module."""

    def __init__(self, c_fc, c_proj):
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = c_fc, c_proj, torch.nn.Dropout(0.0)

    @staticmethod
    def of(mlp):
        return Squared(mlp.c_fc, mlp.c_proj)

    def forward(self, hidden_states):
        return self.c_proj(self.c_fc(hidden_states).square())
