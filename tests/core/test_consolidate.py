"""The way back to the original model: bit for bit, key for key, tie for tie, as a state dict and as a folder."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import models
from partbook.core import (
    PartbookError,
    build,
    consolidate,
    create_schedule,
    gradients,
    materialize,
    save_pretrained,
)
from parts import merged, scheduled_ranks

OPTIONS = [{}, {"fuse_qkv": True}, {"sequence_parallel": True, "fuse_qkv": True, "checkpoint_ratio": 1.0}]
MODELS = [
    ("gpt2", {}),
    ("gpt2", {"tied": False}),
    ("llama", {}),
    ("llama", {"tied": True}),
    ("qwen2", {}),
]


@pytest.mark.parametrize(("name", "config"), MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_parts_of_two_ranks_make_the_dense_model_bit_for_bit(name, config, options):
    """Vocabulary 99 is padded; ``merged`` is this test's own way back, by Layout.merge."""
    dense = getattr(models, name)(**config)
    found = merged(scheduled_ranks(name, 2, options, **config))
    reference = dict(dense.named_parameters())
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[key], reference[key]) for key in reference)


@pytest.mark.parametrize(("name", "config"), MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_state_dict_of_one_rank_is_the_dense_one_with_its_ties(name, config, options):
    reference = getattr(models, name)(**config).state_dict()
    [scheduled] = scheduled_ranks(name, 1, options, **config)
    found = consolidate(scheduled)
    assert list(found) == list(reference)
    assert all(torch.equal(found[key], reference[key]) for key in reference)
    assert pointers(found) == pointers(reference)
    # copies: training on does not change what was taken out
    with torch.no_grad():
        next(scheduled.model.parameters()).add_(1)
    assert all(torch.equal(found[key], reference[key]) for key in reference)


def pointers(tensors):
    first = {}
    return {name: first.setdefault(tensor.data_ptr(), name) for name, tensor in tensors.items()}


def test_gradients_go_back_the_same_way():
    dense, [scheduled] = models.gpt2().double(), scheduled_ranks("gpt2", 1, {"fuse_qkv": True})
    scheduled.model.double()
    weight = torch.randn(4, 16, 99, dtype=torch.float64)
    for model in (dense, scheduled.model):
        (model(models.batch()["input_ids"]).logits * weight).sum().backward()
    reference = {name: parameter.grad for name, parameter in dense.named_parameters()}
    found = gradients(scheduled)
    assert found.keys() == reference.keys()
    for name in reference:
        torch.testing.assert_close(found[name], reference[name], rtol=1e-11, atol=1e-12, msg=name)
    scheduled.model.transformer.wpe.weight.grad = None
    assert gradients(scheduled).keys() == reference.keys() - {"transformer.wpe.weight"}


def test_one_rank_of_a_virtual_mesh_has_no_whole():
    scheduled = scheduled_ranks("gpt2", 2, {})[0]
    with pytest.raises(RuntimeError, match=r"a virtual mesh \(tp=2 pp=1\) has this rank's part only"):
        consolidate(scheduled)


@pytest.mark.parametrize("max_shard_size", [10**9, 20_000])
@pytest.mark.parametrize(("name", "config"), [*MODELS, ("mistral", {})])
def test_saved_folder_is_one_that_plain_transformers_loads(tmp_path, name, config, max_shard_size):
    dense = getattr(models, name)(**config)
    [scheduled] = scheduled_ranks(name, 1, {"fuse_qkv": True}, **config)
    save_pretrained(scheduled, tmp_path, max_shard_size=max_shard_size)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert ("model.safetensors" in files) == (max_shard_size == 10**9)
    assert not [file for file in files if file.startswith(".")]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(dense)
    reference = dense.state_dict()
    assert {key: torch.equal(value, reference[key]) for key, value in loaded.state_dict().items()} == dict.fromkeys(
        reference, True
    )
    assert pointers(loaded.state_dict()) == pointers(reference)
    batch = models.batch()
    assert torch.equal(loaded.eval()(**batch).logits, dense.eval()(**batch).logits)


def test_saving_again_leaves_no_file_of_the_last_time(tmp_path):
    [scheduled] = scheduled_ranks("gpt2", 1, {})
    save_pretrained(scheduled, tmp_path, max_shard_size=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_pretrained(scheduled, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_save_that_fails_leaves_the_folder_as_it_was(tmp_path):
    [scheduled] = scheduled_ranks("gpt2", 1, {})
    save_pretrained(scheduled, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def read(parameter):
        if parameter is scheduled.model.transformer.ln_f.weight:
            raise OSError("disk")
        return parameter.detach() + 1

    with pytest.raises(OSError, match="disk"):
        save_pretrained(scheduled, tmp_path, read, max_shard_size=20_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def full_state(drop=(), **extra):
    state = {name: tensor for name, tensor in models.gpt2().state_dict().items() if name not in drop}
    return state | extra


@pytest.mark.parametrize(
    "state_dict",
    [
        None,
        {},
        lambda model: model.state_dict(),
        full_state(drop=["transformer.ln_f.bias"]),
        full_state(unknown=torch.zeros(1)),
        full_state(drop=["transformer.wte.weight", "lm_head.weight"]),
    ],
    ids=["none", "empty", "slices", "incomplete", "too much", "no embedding"],
)
def test_models_own_save_refuses_to_write_slices(tmp_path, state_dict):
    model = scheduled_ranks("gpt2", 2, {})[1].model
    given = state_dict(model) if callable(state_dict) else state_dict
    with pytest.raises(PartbookError) as caught:
        model.save_pretrained(tmp_path, state_dict=given)
    assert "would write this rank's slices as if they were the model" in str(caught.value)
    assert "save_pretrained of partbook.core (scheduled, folder)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("drop", [(), ("lm_head.weight",)])
def test_models_own_save_takes_a_full_state_dict(tmp_path, drop):
    """As transformers' Trainer passes it; files keep one name of a tied tensor."""
    model = scheduled_ranks("gpt2", 2, {})[1].model
    model.save_pretrained(tmp_path, is_main_process=False, state_dict=full_state(drop))
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path, state_dict=full_state(drop), safe_serialization=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in full_state().items())


def test_model_that_nothing_was_split_or_made_anew_in_saves_as_ever(tmp_path):
    sch = create_schedule(models.gpt2())
    sch["transformer.h.0"].checkpoint()
    build(sch).model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    assert torch.equal(loaded.lm_head.weight, models.gpt2().lm_head.weight)


def test_trained_padding_and_dropped_rows_never_come_out():
    """Round trip through a folder of full tensors: what is written into the padding is lost, all else is kept."""
    ranks = scheduled_ranks("gpt2", 4, {})
    for scheduled in ranks:
        with torch.no_grad():
            for parameter in scheduled.model.parameters():
                parameter.add_(1)
    reference = {name: parameter + 1 for name, parameter in models.gpt2().named_parameters()}
    found = merged(ranks)
    assert all(torch.equal(found[name], reference[name]) for name in reference)
    again = [materialize(scheduled, found) for scheduled in scheduled_ranks("gpt2", 4, {})]
    assert torch.equal(again[3].model.lm_head.weight[99 - 75 :], torch.zeros(1, 32))
    assert all(torch.equal(value, found[name]) for name, value in merged(again).items())
