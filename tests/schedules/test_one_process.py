"""The model schedules in a single process: the same numbers as the untouched model, and nothing of it lost."""

import copy
import inspect
import itertools

import pytest
import torch
from torch.nn import functional

import models
from partbook.core import Mesh, apply_schedule, build, create_schedule, verify
from replays import assert_refused, assert_unchanged

MODELS = [
    ("gpt2", {}),
    ("gpt2", {"tied": False}),
    ("llama", {}),
    ("llama", {"tied": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("bert", {}),
    ("bert", {"tied": False}),
    ("t5", {}),
    ("t5", {"gated": True, "tied": False}),
]
OPTIONS = [
    {},
    {"fuse_qkv": True},
    {"sequence_parallel": True, "checkpoint_ratio": 0.5},
    {"tensor_parallel": False, "fuse_qkv": True, "checkpoint_ratio": 1.0},
]


def schedule_of(name):
    return "llama" if name in ("mistral", "qwen2") else name


def batch_for(name, **options):
    batch = models.batch(**options)
    return {**batch, "decoder_input_ids": batch["input_ids"].flip(1)} if name == "t5" else batch


def scheduled_model(name, options, **config):
    sch = create_schedule(getattr(models, name)(**config))
    return build(apply_schedule(sch, schedule_of(name), options)).model


def loss_and_gradients(model, batch):
    """Cross-entropy in the logits' own precision; transformers' loss rounds them to float32."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "config"), MODELS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients_are_those_of_the_dense_model(name, config, options, padded):
    batch = batch_for(name, padded=padded)
    reference, dense_gradients = loss_and_gradients(getattr(models, name)(**config).double(), batch)
    model = scheduled_model(name, options, **config).double()
    found, gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    compared = {key for key in gradients if dense_gradients.get(key) is not None}
    # what is fused or transposed has its test through the weight map, in tests/core/test_consolidate.py
    assert len(compared) > len(dense_gradients) / 2
    for key in compared:
        if gradients[key].shape == dense_gradients[key].shape:
            torch.testing.assert_close(gradients[key], dense_gradients[key], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize(("name", "config"), MODELS)
def test_split_alone_changes_not_one_bit(name, config):
    batch = batch_for(name) | {"use_cache": False}
    reference, dense_gradients = loss_and_gradients(getattr(models, name)(**config), batch)
    found, gradients = loss_and_gradients(scheduled_model(name, {"checkpoint_ratio": 1.0}, **config), batch)
    assert torch.equal(found, reference)
    assert gradients.keys() == dense_gradients.keys()
    for key, value in dense_gradients.items():
        # an untied BERT has a bias that nothing uses
        assert torch.equal(gradients[key], value) if value is not None else gradients[key] is None, key


@pytest.mark.parametrize(("name", "config"), MODELS)
@pytest.mark.parametrize("labels", ["as they are", "with num_items_in_batch"])
def test_models_own_loss_is_that_of_transformers(name, config, labels):
    batch = batch_for(name, padded=True) | ({} if labels == "as they are" else {"num_items_in_batch": 37})
    expected = getattr(models, name)(**config)(**batch)
    found = scheduled_model(name, {}, **config)(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize(("name", "options"), [("gpt2", OPTIONS[1]), ("llama", OPTIONS[1]), ("llama", OPTIONS[2])])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_generation_with_the_cache_gives_the_dense_models_tokens(name, options, num_beams):
    ids = models.batch(size=2)["input_ids"][:, :6]
    arguments = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": num_beams,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    reference = getattr(models, name)().eval().generate(ids, **arguments)
    model = scheduled_model(name, options)
    loss_and_gradients(model, models.batch())
    model.eval()
    calls = []
    model.get_submodule("transformer.h.1" if name == "gpt2" else "model.layers.1").register_forward_pre_hook(
        lambda module, args: calls.append(args[0].shape[1])
    )
    assert torch.equal(model.generate(ids, **arguments), reference)
    assert calls == [6] + [1] * 7


def test_model_stays_the_users_own():
    """Class, signature, hooks, deep copies, state-dict keys: what trainers and tools look at."""
    dense, model = models.gpt2(), models.gpt2()
    seen = []
    model.transformer.h[0].attn.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    build(apply_schedule(create_schedule(model), "gpt2", {"checkpoint_ratio": 1}))
    assert isinstance(model, type(dense))
    assert type(model).__name__ == "GPT2LMHeadModel"
    block, dense_block = model.transformer.h[0], dense.transformer.h[0]
    assert isinstance(block, type(dense_block))
    assert inspect.signature(block.forward) == inspect.signature(dense_block.forward)
    assert list(model.state_dict()) == list(dense.state_dict())
    batch = models.batch()
    loss = model(**batch).loss
    assert seen == ["GPT2Attention"]
    assert torch.equal(copy.deepcopy(model)(**batch).loss, loss)


def test_fused_projections_keep_no_activation_between_steps():
    model = scheduled_model("llama", {"fuse_qkv": True})
    model(**models.batch()).loss.backward()
    fused = model.model.layers[0].self_attn.qkv_proj
    assert not fused._waiting
    assert fused._input is None


def test_a_fused_projection_that_was_interrupted_starts_anew():
    """An error between q and v must not give the next input the last one's keys."""
    dense, model = models.llama().eval(), scheduled_model("llama", {"fuse_qkv": True}).eval()
    attn = model.model.layers[0].self_attn
    x, y = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    attn.q_proj(x)
    for name in ("k_proj", "q_proj", "v_proj"):
        torch.testing.assert_close(attn.get_submodule(name)(y), dense.model.layers[0].self_attn.get_submodule(name)(y))


@pytest.mark.parametrize(
    ("ratio", "layers", "blocks"), [(0, 4, ""), (0.5, 4, "13"), (1, 4, "0123"), (0.3, 10, "369"), (1 / 3, 3, "2")]
)
def test_checkpoint_ratio_spreads_over_the_blocks(ratio, layers, blocks):
    sch = apply_schedule(create_schedule(models.gpt2(layers=layers)), "gpt2", {"checkpoint_ratio": ratio})
    assert "".join(step.path[-1] for step in sch.history if step.primitive.verb == "checkpoint") == blocks


REFUSALS = [
    (
        "gpt2",
        {},
        3,
        {},
        "sch['transformer.h.0.attn']",
        "its 4 attention heads do not divide by tp=3",
        "tp must divide 4",
    ),
    ("llama", {}, 8, {}, "sch['model.layers.0.self_attn']", "its 4 attention heads do not divide by tp=8"),
    (
        "llama",
        {"num_attention_heads": 12, "kv_heads": 3, "head_dim": 4, "hidden_size": 48},
        2,
        {},
        "its 3 key-value heads neither divide by tp=2 nor into it",
    ),
    (
        "llama",
        {},
        4,
        {"fuse_qkv": True},
        "its 2 key-value heads are shared by tp=4 ranks, which a fused QKV cannot do",
        "fuse_qkv=False",
    ),
    ("bert", {}, 3, {}, "sch['bert.encoder.layer.0.attention.self']", "its 4 attention heads do not divide by tp=3"),
    (
        "bert",
        {"is_decoder": True, "add_cross_attention": True},
        2,
        {},
        "sch['bert.encoder.layer.0']",
        "its cross-attention has no rule",
        "tensor_parallel=False",
    ),
    ("bert", {"intermediate_size": 50}, 4, {}, "bert.encoder.layer.0.intermediate.dense", "does not divide by tp=4"),
    (
        "t5",
        {},
        3,
        {},
        "sch['encoder.block.0.layer.0.SelfAttention']",
        "its 4 attention heads do not divide by tp=3",
        "tp must divide 4",
    ),
    (
        "t5",
        {},
        2,
        {"fuse_gate_up": True},
        "sch['encoder.block.0.layer.1.DenseReluDense']",
        "its feed-forward has no gate",
        "fuse_gate_up=False",
    ),
    (
        "llama",
        {"intermediate_size": 50},
        4,
        {},
        "model.layers.0.mlp.gate_proj",
        "size 50 of axis 0",
        "does not divide by tp=4",
    ),
]


@pytest.mark.parametrize(("name", "config", "tp", "options", "message"), [(*row[:4], row[4:]) for row in REFUSALS])
def test_model_that_cannot_be_split_is_refused_naming_the_module(name, config, tp, options, message):
    sch = create_schedule(getattr(models, name)(**config), Mesh(tp=tp))
    with pytest.raises(ValueError) as caught:
        assert_unchanged(sch, lambda: apply_schedule(sch, schedule_of(name), options))
    for fragment in message:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_checkpoint_ratio_outside_its_range_is_refused(ratio):
    sch = create_schedule(models.gpt2())
    with pytest.raises(ValueError, match=f"checkpoint_ratio={ratio} is not between 0 and 1"):
        assert_unchanged(sch, lambda: apply_schedule(sch, "gpt2", {"checkpoint_ratio": ratio}))


def test_schedule_twice_is_refused():
    sch = apply_schedule(create_schedule(models.gpt2(), Mesh(tp=2)), "gpt2")
    assert_refused(
        sch, lambda s: s["transformer.wte"].shard("weight", axis=0), "transformer.wte.weight is sharded already"
    )
    with pytest.raises(ValueError, match="sharded already"):
        assert_unchanged(sch, lambda: apply_schedule(sch, "gpt2"))


@pytest.mark.parametrize(("name", "tp"), itertools.product(["gpt2", "llama", "qwen2"], [2, 4]))
def test_kv_heads_fewer_than_ranks_are_replicated_and_nothing_else_is(name, tp):
    sch = apply_schedule(create_schedule(getattr(models, name)(), Mesh(tp=tp)), schedule_of(name))
    replicated = {path.split(".")[-2] for path, layout in sch.state.layouts.items() if layout.replicas > 1}
    assert replicated == ({"k_proj", "v_proj"} if tp == 4 and name != "gpt2" else set())


def test_embeddings_that_are_one_module_are_summed_once():
    """A T5 that was resized holds one embedding under three names, a fresh one three with one weight."""
    for resized, paths in [(True, ["shared"]), (False, ["shared", "encoder.embed_tokens", "decoder.embed_tokens"])]:
        model = models.t5()
        if resized:
            model.resize_token_embeddings(101)
        sch = apply_schedule(create_schedule(model, Mesh(tp=2)), "t5")
        syncs = [step.path for step in sch.history if step.primitive.verb == "sync" and "embed" in step.path]
        found = [step.path for step in sch.history if step.path in paths and step.primitive.verb == "sync"]
        assert found == paths
        assert set(syncs) <= set(paths)
        assert {model.get_submodule(path).weight.shape[0] for path in paths} == {51 if resized else 50}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_running_one_rank_of_a_virtual_mesh_says_what_to_do(name):
    sch = create_schedule(getattr(models, name)(), Mesh(tp=2))
    model = build(apply_schedule(sch, name)).model
    with pytest.raises(
        RuntimeError, match=r"scheduled on a virtual mesh \(tp=2\): it can be planned.*mesh of a dialect"
    ):
        model(**models.batch())


def test_verification_passes_in_one_process():
    report = verify(models.gpt2(), "gpt2", Mesh(), models.batch(), steps=2, dtype=torch.float64)
    assert report.ok, str(report)
    assert {"loss", "gradient", "parameter"} <= {difference.what for difference in report.differences}
