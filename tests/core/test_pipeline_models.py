"""transformers models cut into stages: what crosses, what each stage reads, bit-equal numbers, parts of a rank."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)

import models
import pipelines
from partbook.core import History, Mesh, ScheduleError, apply_schedule, build, create_schedule, materialize, verify
from partbook.core.pipeline.balance import balance

BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer"}
T5_CUTS = ("encoder.block.1", "encoder", "decoder.block.0", "decoder.block.1")
MAKE: dict[str, Callable[..., Any]] = {name: getattr(models, name) for name in (*BLOCKS, "t5")}


def batch_of(name: str, **options: Any) -> dict[str, torch.Tensor]:
    return models.pair(**options) if name == "t5" else models.batch(**options)


@pytest.mark.parametrize("name", BLOCKS)
def test_one_hidden_state_crosses_and_masks_are_made_again(name: str) -> None:
    scheduled = pipelines.cut(MAKE[name](layers=3), f"{BLOCKS[name]}.0", f"{BLOCKS[name]}.1")
    for crossing in pipelines.crossing(scheduled):
        ((_, shape, dtype, has_gradient),) = crossing
        assert len(shape) == 3
        assert shape[2] == 32
        assert dtype is torch.float32
        assert has_gradient
    raw = [set(part.raw) for part in scheduled.pipeline.wirings[0].parts]
    assert raw == [{"input_ids", "attention_mask"}, {"attention_mask"}, {"attention_mask", "labels"}]


def test_t5_sends_what_it_needs_and_no_more() -> None:
    scheduled = pipelines.cut(MAKE["t5"](layers=3), *T5_CUTS)
    found = [[(shape, gradient) for _, shape, _, gradient in one] for one in pipelines.crossing(scheduled)]
    (b, s, _), t = found[0][0][0], found[2][1][0][1]
    hidden, bias = ((b, s, 32), True), ((1, 4, s, s), True)
    decoder = [hidden, ((b, t, 32), True), ((1, 4, t, t), True), ((1, 4, t, s), False)]
    assert found == [[hidden, bias], [hidden], decoder, decoder]
    raw = [set(part.raw) for part in scheduled.pipeline.wirings[0].parts]
    mask, labels = {"attention_mask"}, {"labels"}
    assert raw == [{"input_ids"} | mask, mask, mask | labels, mask, mask | labels]


HEADS = [
    BertForMultipleChoice, BertForNextSentencePrediction, BertForPreTraining, BertForQuestionAnswering,
    BertForSequenceClassification, BertForTokenClassification,
]  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_every_head_of_bert_is_cut_without_example_inputs(head: Any) -> None:
    model = models.bert(cls=head).eval()
    scheduled = pipelines.cut(copy.deepcopy(model), "bert.encoder.layer.0")
    ids = models.batch(length=8)["input_ids"]
    batch = {"input_ids": ids[:, None].repeat(1, 3, 1)} if head is BertForMultipleChoice else {"input_ids": ids}
    with torch.no_grad():
        found, wanted = pipelines.run(scheduled, batch, backward=False), model(**batch)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("name", MAKE)
def test_numbers_are_those_of_the_eager_model(name: str) -> None:
    """Other sizes run on the same wiring; without a mask, in evaluation and without labels it is another."""
    model = MAKE[name](layers=3).train()
    cuts = T5_CUTS if name == "t5" else (f"{BLOCKS[name]}.0", f"{BLOCKS[name]}.1")
    scheduled = pipelines.cut(copy.deepcopy(model), *cuts)
    pipeline = scheduled.pipeline
    for size, length in ((4, 16), (2, 9)):
        pipelines.assert_same(scheduled, model, batch_of(name, size=size, length=length, padded=True))
    assert len(pipeline.wirings) == 1
    pipelines.assert_same(scheduled, model, batch_of(name))
    pipelines.assert_same(scheduled, model, batch_of(name, size=1, padded=True))
    same = models.batch(size=2)["input_ids"]
    if name != "t5":
        # one tensor under two names, as many scripts have it
        pipelines.assert_same(scheduled, model, {"input_ids": same, "labels": same})
    model.eval()
    scheduled.model.eval()
    batch = batch_of(name, padded=True)
    with torch.no_grad():
        found, wanted = pipelines.run(scheduled, batch, backward=False), model(**batch)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)


def test_cut_inside_a_block_sends_the_residual_too() -> None:
    model = MAKE["gpt2"](layers=3).train()
    scheduled = pipelines.cut(copy.deepcopy(model), "transformer.h.0.attn", "transformer.h.1.mlp.c_fc")
    assert [len(crossing) for crossing in pipelines.crossing(scheduled)] == [2, 2]
    pipelines.assert_same(scheduled, model, models.batch(padded=True))


def test_scheduled_blocks_run_in_stages() -> None:
    """Fused, recomputed and split: what a schedule does inside of blocks stays."""
    verify(models.llama, "llama", Mesh(pp=2), models.batch(padded=True), schedule_args={
        "fuse_qkv": True, "fuse_gate_up": True, "checkpoint_ratio": 0.5,
    }).raise_if_failed()  # fmt: skip


def test_sequence_parallel_boundaries_carry_a_slice() -> None:
    sch = create_schedule(models.on_meta(models.llama, layers=4), Mesh(pp=2, tp=2, rank=1))
    apply_schedule(sch, "llama", {"sequence_parallel": True})
    sch["model.layers.1"].cut_pipeline_stage()
    scheduled = build(sch)
    wiring = scheduled.pipeline.wirings[0]
    (value,) = wiring.parts[0].sent
    inputs = {name: torch.zeros(2, 14, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    inputs["attention_mask"] = torch.ones(2, 14, dtype=torch.int64, device="meta")
    instance = wiring.at(wiring.values(scheduled.pipeline.skeleton.train(), inputs))
    assert instance.shape(value) == (2, 7, 32)


@pytest.mark.parametrize("name", MAKE)
def test_ranks_hold_parts_whose_union_is_the_model(name: str) -> None:
    dense = MAKE[name](layers=4)
    state, held = dense.state_dict(), {}
    ranks = []
    for rank in range(3):
        sch = create_schedule(models.on_meta(MAKE[name], layers=4), Mesh(pp=3, rank=rank))
        scheduled = build(sch.cut_pipeline_stages())
        materialize(scheduled, dense)
        part = scheduled.model.state_dict()
        assert part.keys() <= state.keys()
        for key, tensor in part.items():
            assert torch.equal(tensor, state[key]), key
        assert not any(parameter.is_meta for parameter in scheduled.model.parameters())
        assert set(scheduled.weights) == {key for key, _ in scheduled.model.named_parameters()}
        held |= part
        ranks.append(scheduled)
    ties = ranks[0].original.ties
    missing = {key for key in state if key not in held and ties.get(key, key) not in held}
    assert {key for key in missing if not any(torch.equal(state[key], t) for t in held.values())} == set()
    # one owner counts a tied parameter, the others have copies of it
    for tie in ranks[0].ties_across:
        counted = [rank for rank in tie.ranks if ranks[rank].counts_here(tie.names[rank])]
        assert counted == tie.ranks[:1]
    if name in ("gpt2", "t5"):
        assert ranks[0].ties_across
    if name == "llama":
        assert not ranks[0].ties_across


def test_history_saves_and_replays() -> None:
    sch = create_schedule(models.on_meta(models.gpt2, layers=4), Mesh(pp=2))
    sch.cut_pipeline_stages(by="parameters")
    again = History.from_json(sch.history.to_json()).replay(models.on_meta(models.gpt2, layers=4))
    assert again.state.cuts == sch.state.cuts
    assert again.history == sch.history
    assert str(again) == str(sch)


@pytest.mark.parametrize("by", ["parameters", "flops", "time"])
def test_automatic_cuts_balance(by: Any) -> None:
    """With a head as large as two or three blocks, which costs FLOPs, and an embedding that costs none."""
    sch = create_schedule(models.on_meta(models.llama, layers=6, vocab=700), Mesh(pp=2))
    sch.cut_pipeline_stages(by=by)
    (cut,) = sch.state.cuts
    block = int(cut.rpartition(".")[2])
    assert block == {"parameters": 2, "flops": 3}.get(by, block)
    assert 0 <= block <= 5


@pytest.mark.parametrize(
    ("costs", "stages"), [([3, 1, 4, 1, 5, 9, 2, 6], 3), ([1] * 7, 4), ([9, 1, 1, 1], 2), ([2], 1)]
)
def test_balance_is_the_best_of_all(costs: list[int], stages: int) -> None:
    def largest(cuts: Any) -> int:
        bounds = [0, *(cut + 1 for cut in cuts), len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(largest(cuts) for cuts in itertools.combinations(range(len(costs) - 1), stages - 1))
    found = balance(costs, stages)
    assert len(found) == stages - 1
    assert largest(found) == best


def test_printed_schedule_shows_where_stages_end_and_what_crosses() -> None:
    sch = pipelines.cut_schedule(models.on_meta(models.gpt2, layers=2), "transformer.h.0", mesh=Mesh(pp=2))
    text = str(sch)
    assert "0: GPT2Block  | end of a stage" in text
    assert "    transformer_h_0 [B, S, 32] float32, 1,792 bytes, and its gradient" in text
    # a node alone is not the whole model
    assert "stage 0" not in str(sch["transformer"])


@pytest.mark.parametrize(
    ("cuts", "mesh", "message"),
    [
        ((), Mesh(pp=2), "the mesh has pp=2, and nothing cuts the model"),
        (("transformer.h.0", "transformer.h.1"), Mesh(pp=2), "2 cuts make 3 stages, which do not fit on pp=2 ranks"),
        (("transformer.h.0",), Mesh(pp=4), "1 cuts make 2 stages, which do not fit on pp=4 ranks"),
        (("transformer.h.0.attn.attn_dropout",), Mesh(pp=2), "is not called"),
        (("lm_head",), Mesh(pp=2), None),
    ],
)
def test_cuts_that_do_not_fit_are_refused(cuts: tuple[str, ...], mesh: Mesh, message: str | None) -> None:
    sch = pipelines.cut_schedule(models.on_meta(models.gpt2, layers=3), *cuts, mesh=mesh)
    if message is None:
        build(sch)
        return
    with pytest.raises(ScheduleError) as refused:
        build(sch)
    assert message in str(refused.value)
    assert "test_pipeline_models.py" in str(refused.value)
