"""``materialize``: only this rank's slices, from wherever the weights are, and nothing at all where they do not fit."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import models
from partbook.core import Mesh, WeightsError, apply_schedule, build, create_schedule, materialize
from parts import merged, scheduled_rank, scheduled_ranks
from replays import assert_unchanged

ALL = {"fuse_qkv": True, "sequence_parallel": True}
MODELS = [("gpt2", {}), ("gpt2", {"tied": False}), ("llama", {}), ("llama", {"tied": True})]


def filled_ranks(name, source, tp, options=None, **config):
    return [materialize(scheduled, source) for scheduled in scheduled_ranks(name, tp, options, meta=True, **config)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders as transformers writes them: one file, a sharded index, and a bare model without its head's prefix."""
    root = tmp_path_factory.mktemp("folders")
    for name, config in MODELS:
        for kind, size in (("single", "5GB"), ("sharded", "20KB")):
            getattr(models, name)(seed=5, **config).save_pretrained(root / f"{name}{config}{kind}", max_shard_size=size)
    models.gpt2(seed=5).transformer.save_pretrained(root / "bare")
    return root


@pytest.mark.parametrize(("name", "config"), MODELS)
@pytest.mark.parametrize("kind", ["model", "state dict", "single", "sharded"])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_ranks_together_hold_the_source_bit_for_bit(folders, name, config, kind, tp):
    dense = getattr(models, name)(seed=5, **config)
    folder = folders / f"{name}{config}{kind}"
    assert (folder / "model.safetensors.index.json").exists() == (kind == "sharded")
    source = {"model": dense, "state dict": dense.state_dict()}.get(kind, folder)
    reference = dict(dense.named_parameters())
    for options in ({}, ALL):
        ranks = filled_ranks(name, source, tp, options, **config)
        found = merged(ranks)
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[key], reference[key]) for key in reference)
        for scheduled in ranks:
            assert not [key for key, value in scheduled.model.state_dict().items() if value.is_meta]
            if config.get("tied", name == "gpt2"):
                assert scheduled.model.lm_head.weight is scheduled.model.get_input_embeddings().weight


def test_checkpoint_of_a_bare_model_and_a_file_are_taken_too(folders, tmp_path):
    reference = dict(models.gpt2(seed=5).named_parameters())
    shutil.copy(folders / "bare/model.safetensors", tmp_path / "weights.safetensors")
    for source in (folders / "bare", str(folders / "bare"), tmp_path / "weights.safetensors"):
        assert all(
            torch.equal(tensor, reference[name]) for name, tensor in merged(filled_ranks("gpt2", source, 2)).items()
        )


def test_real_parameters_are_filled_in_place():
    """An optimizer that knows them stays valid."""
    scheduled, source = scheduled_rank("gpt2", 2, 1), models.gpt2(seed=5)
    before = dict(scheduled.model.named_parameters())
    optimizer = torch.optim.SGD(scheduled.model.parameters())
    materialize(scheduled, source)
    assert all(scheduled.model.get_parameter(name) is parameter for name, parameter in before.items())
    assert optimizer.param_groups[0]["params"][0] is scheduled.model.transformer.wte.weight
    assert torch.equal(scheduled.model.transformer.ln_f.weight, source.transformer.ln_f.weight)


def test_filled_model_shares_no_memory_with_its_source():
    source = models.llama()
    scheduled = materialize(scheduled_rank("llama", meta=True), source)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert not any((parameter == 0).all() for parameter in scheduled.model.parameters())


def test_model_keeps_its_dtype_and_frozen_parameters(folders):
    model = models.on_meta(models.llama).to(torch.bfloat16)
    model.model.norm.weight.requires_grad_(False)
    scheduled = materialize(build(create_schedule(model)), folders / "llama{}single")
    assert {parameter.dtype for parameter in scheduled.model.parameters()} == {torch.bfloat16}
    assert not scheduled.model.model.norm.weight.requires_grad
    reference = models.llama(seed=5).lm_head.weight
    assert torch.equal(scheduled.model.lm_head.weight, reference.to(torch.bfloat16))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("config", [{}, {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}}])
@pytest.mark.parametrize("source", ["fresh", "state dict", "model"])
def test_buffers_that_no_file_holds_are_those_of_an_ordinary_model(config, source):
    dense = models.llama(**config)
    given = {"fresh": 1, "state dict": dense.state_dict(), "model": dense}[source]
    scheduled = materialize(scheduled_rank("llama", 2, 1, meta=True, **config), given)
    found, reference = dict(scheduled.model.named_buffers()), dict(dense.named_buffers())
    assert found.keys() == reference.keys()
    assert len(reference) == 2
    assert all(
        torch.equal(found[name], reference[name]) and found[name].dtype == reference[name].dtype for name in reference
    )


@pytest.mark.parametrize(("name", "config"), MODELS)
def test_fresh_weights_are_the_same_whatever_the_mesh(name, config):
    reference = merged(filled_ranks(name, 3, 1, **config))
    for tp, options in [(2, None), (2, ALL), (4, None)]:
        found = merged(filled_ranks(name, 3, tp, options, **config))
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[key], reference[key]) for key in reference), (tp, options)
    other = merged(filled_ranks(name, 4, 1, **config))
    assert not torch.equal(other[next(iter(other))], reference[next(iter(reference))])
    # the random state of the caller is as it was
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    filled_ranks(name, 3, 1, **config)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fresh_weights_are_distributed_as_transformers_own(name):
    sizes = {"vocab": 512, "layers": 3}
    wide = {"n_embd": 64} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    config = getattr(models, name)(**sizes, **wide).config
    torch.manual_seed(0)
    reference = dict(type(getattr(models, name)())(config).named_parameters())
    model = models.on_meta(getattr(models, name), **sizes, **wide)
    found = merged([materialize(build(create_schedule(model)), 7)])
    seen = []
    for key, own in reference.items():
        if own.ndim == 1:
            assert torch.equal(found[key], own), f"{key} is no {own[0]:g}"
            continue
        assert abs(found[key].std() / own.std() - 1) < 0.1, key
        assert abs(found[key].mean()) < 0.002, key
        seen.append(tuple(found[key].flatten()[:4].tolist()))
    # no two tensors got the same numbers
    assert len(set(seen)) == len(seen)
    if name == "gpt2":
        scaled = found["transformer.h.0.mlp.c_proj.weight"].std()
        assert abs(scaled / (0.02 / math.sqrt(2 * 3)) - 1) < 0.1


def test_modules_without_transformers_initialise_themselves():
    model = models.on_meta(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.BatchNorm1d(64), nn.Embedding(9, 64))
    )
    materialize(build(create_schedule(model)), 0)
    linear, norm, batch_norm, embedding = model
    assert abs(linear.weight.std() * 8 * math.sqrt(3) - 1) < 0.05
    assert linear.bias.abs().max() <= 1 / 8
    assert abs(embedding.weight.std() - 1) < 0.1
    assert torch.equal(norm.weight, torch.ones(64))
    assert torch.equal(batch_norm.running_var, torch.ones(64))
    assert batch_norm.num_batches_tracked == 0


def test_a_rank_of_nothing_but_padding_is_filled_with_zeros(folders, tmp_path):
    """9 words on 8 ranks are 2 a rank: ranks 5 to 7 hold none."""
    models.gpt2(vocab=9, n_head=8).save_pretrained(tmp_path)
    for source in (tmp_path, 0, models.gpt2(vocab=9, n_head=8)):
        ranks = filled_ranks("gpt2", source, 8, vocab=9, n_head=8)
        assert [tuple(scheduled.model.lm_head.weight.shape) for scheduled in ranks] == [(2, 32)] * 8
        assert all(torch.equal(ranks[rank].model.lm_head.weight, torch.zeros(2, 32)) for rank in (5, 6, 7))
        assert merged(ranks)["transformer.wte.weight"].shape == (9, 32)


def broken_folder(folders, target, change):
    """A copy of the single-file GPT-2 folder whose tensors ``change`` has altered."""
    tensors = load_file(folders / "gpt2{}single/model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def no_ln_f(folders, target):
    return broken_folder(folders, target, lambda t: t.pop("transformer.ln_f.bias"))


def narrow(folders, target):
    return broken_folder(folders, target, lambda t: t.update({"transformer.wpe.weight": torch.zeros(32, 31)}))


def empty(folders, target):
    (target / "pytorch_model.bin").write_bytes(b"")
    return target


def garbage(folders, target):
    (target / "model.safetensors").write_bytes(b"not a file of tensors")
    return target


def index_of_missing_file(folders, target):
    shutil.copytree(folders / "gpt2{}sharded", target, dirs_exist_ok=True)
    sorted(target.glob("*.safetensors"))[1].unlink()
    return target


def index_of_missing_tensor(folders, target):
    shutil.copytree(folders / "gpt2{}sharded", target, dirs_exist_ok=True)
    index = target / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["transformer.ln_f.bias"] = content["weight_map"]["transformer.wte.weight"]
    index.write_text(json.dumps(content))
    return target


def meta_tensor(folders, target):
    return models.gpt2().state_dict() | {"transformer.ln_f.bias": torch.zeros(32, device="meta")}


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (no_ln_f, ("do not fit the model", "'transformer.ln_f.bias' is missing in", "'transformer.ln_f.weight'")),
        (narrow, ("'transformer.wpe.weight' is [32, 31] there, but [32, 32] in the model",)),
        (
            empty,
            (
                "holds neither model.safetensors nor its index, but ['pytorch_model.bin']",
                "save_pretrained of transformers",
            ),
        ),
        (lambda folders, target: target / "gone", ("gone holds neither", "which does not exist")),
        (garbage, ("model.safetensors cannot be read",)),
        (index_of_missing_file, ("model.safetensors.index.json names files that are missing: model-00002-of-",)),
        (index_of_missing_tensor, ("'transformer.ln_f.bias' is missing in", ".safetensors, where the index has it")),
        (meta_tensor, ("'transformer.ln_f.bias' is on the meta device",)),
        (lambda *_: {}, ("'transformer.wte.weight' is missing; there are none", "and 20 more")),
        (lambda *_: models.llama(), ("'transformer.wpe.weight' is missing; ", "'lm_head.weight'")),
        (lambda *_: models.gpt2(vocab=64), ("'transformer.wte.weight' is [64, 32] there, but [99, 32] in the model",)),
        (lambda *_: True, ("cannot take weights from a bool",)),
        (lambda *_: None, ("cannot take weights from a NoneType: pass a model, a state dict, a folder, or an int",)),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(folders, tmp_path, source, message, meta):
    make = models.gpt2
    sch = create_schedule(models.on_meta(make) if meta else make(), Mesh(tp=2, rank=1))
    scheduled = build(apply_schedule(sch, "gpt2", {"fuse_qkv": True}))
    given = source(folders, tmp_path)
    with pytest.raises(WeightsError) as caught:
        assert_unchanged(sch, lambda: materialize(scheduled, given))
    for fragment in message:
        assert fragment in str(caught.value)


class Own(nn.Module):
    """A parameter that nothing but the constructor initialises."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))


@pytest.mark.parametrize("meta", [True, False])
def test_parameter_that_its_model_cannot_initialise_is_refused_and_nothing_changes(meta):
    # behind one that is initialised without trouble
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Own())  # noqa: E731
    sch = create_schedule(models.on_meta(make) if meta else make())
    with pytest.raises(WeightsError) as caught:
        assert_unchanged(sch, lambda: materialize(build(sch), 0))
    assert "'2.scale' is not initialised by the model's own code (Own at '2')" in str(caught.value)
    assert "pass a folder or a dense model" in str(caught.value)


def test_buffer_that_the_constructor_made_is_kept():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)

    model = Masked()
    materialize(build(create_schedule(model)), 0)
    assert torch.equal(model.mask, torch.tril(torch.ones(4, 4)))


def test_persistent_buffer_that_is_missing_is_refused():
    """It would silently stay as it was; running statistics are weights like any other."""
    make = lambda: nn.Sequential(nn.BatchNorm1d(4))  # noqa: E731
    state = {name: tensor for name, tensor in make().state_dict().items() if name != "0.running_mean"}
    sch = create_schedule(models.on_meta(make))
    with pytest.raises(WeightsError, match=r"'0.running_mean' is missing"):
        assert_unchanged(sch, lambda: materialize(build(sch), state))
