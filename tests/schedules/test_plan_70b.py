"""A mesh that is not there: every rank of a Llama-3-70B on tp 8, planned and counted in this one process."""

import collections

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import models
from partbook.core import Mesh, apply_schedule, build, create_schedule

LAYERS, HIDDEN, FFN, VOCABULARY, HEADS, KV_HEADS = 80, 8192, 28672, 128256, 64, 8
HEAD = HIDDEN // HEADS

# by hand: what one layer holds that is split, and what every rank holds whole
SPLIT_LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD + 3 * HIDDEN * FFN
SPLIT = 2 * VOCABULARY * HIDDEN + LAYERS * SPLIT_LAYER
REPLICATED = LAYERS * 2 * HIDDEN + HIDDEN


def llama_70b():
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, vocab_size=VOCABULARY,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def ranks():
    made = []
    for rank in range(8):
        sch = create_schedule(models.on_meta(llama_70b), Mesh(tp=8, rank=rank))
        made.append(build(apply_schedule(sch, "llama")))
    return made


def numbers_of(scheduled):
    return {name: parameter.numel() for name, parameter in scheduled.model.named_parameters()}


def test_parts_of_all_ranks_add_up_to_the_model_and_what_is_replicated(ranks):
    assert SPLIT + REPLICATED == 70_553_706_496
    assert sum(parameter.numel() for parameter in models.on_meta(llama_70b).parameters()) == SPLIT + REPLICATED
    parts = [numbers_of(scheduled) for scheduled in ranks]
    assert [sum(part.values()) for part in parts] == [SPLIT // 8 + REPLICATED] * 8
    assert sum(sum(part.values()) for part in parts) == (SPLIT + REPLICATED) + 7 * REPLICATED
    # each element counts on one rank
    counting = sum(n for part, s in zip(parts, ranks, strict=True) for name, n in part.items() if s.counts_here(name))
    assert counting == SPLIT + REPLICATED


def test_each_rank_holds_other_rows(ranks):
    name = "model.layers.79.mlp.down_proj.weight"
    assert [scheduled.layouts[name].ranges(i) for i, scheduled in enumerate(ranks)] == [
        [(i * FFN // 8, (i + 1) * FFN // 8)] for i in range(8)
    ]
    shapes = collections.Counter(tuple(scheduled.model.get_parameter(name).shape) for scheduled in ranks)
    assert shapes == {(HIDDEN, FFN // 8): 8}
    assert all(parameter.is_meta for parameter in ranks[7].model.parameters())


def test_tree_of_eighty_layers_fits_a_screen():
    sch = create_schedule(models.on_meta(llama_70b), Mesh(tp=8))
    text = str(apply_schedule(sch, "llama"))
    assert "0 to 79: LlamaDecoderLayer" in text
    assert len(text.splitlines()) < 25
