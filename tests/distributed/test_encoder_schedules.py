"""BERT and T5: scheduled on two ranks they train exactly as the untouched models in one process."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    MT5Config,
    MT5ForConditionalGeneration,
)

import models
import partbook.dialects.deepspeed as on_deepspeed
from counting import Collectives
from partbook.core import Mesh, gradients, verify
from partbook.dialects.pytorch import initialize
from ranks import on_ranks

SP = {"sequence_parallel": True}
FUSED = {"fuse_qkv": True}
GATE = {"fuse_gate_up": True}
GATED = {"gated": True, "tied": False}
PARALLEL = {**SP, **FUSED, "checkpoint_ratio": 0.5}

# family, what its model is built with, options of the schedule, whether there are padding masks
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "bert": ("bert", {}, {}, True),
    "bert untied, unpadded": ("bert", {"tied": False}, {}, False),
    "bert vocabulary divides": ("bert", {"vocab": 64}, FUSED, True),
    "bert sequence parallel": ("bert", {}, SP, True),
    "bert parallel options": ("bert", {"pad_token_id": 98}, PARALLEL, True),
    "bert checkpointed": ("bert", {}, {"checkpoint_ratio": 1.0}, False),
    "bert feed-forward in chunks": ("bert", {"chunk_size_feed_forward": 4}, SP, True),
    "t5": ("t5", {}, {}, True),
    "t5 untied head": ("t5", {"tied": False}, SP, True),
    "t5 vocabulary divides": ("t5", {"vocab": 64}, FUSED, False),
    "t5 sequence parallel": ("t5", {}, SP, True),
    "t5 gated": ("t5", GATED, {}, True),
    "t5 gated, fused": ("t5", GATED, {**FUSED, **GATE}, True),
    "t5 gated, parallel options": ("t5", GATED, {**PARALLEL, **GATE}, True),
    "t5 checkpointed": ("t5", {}, {"checkpoint_ratio": 1.0}, True),
    "mt5": ("t5", {"cls": MT5ForConditionalGeneration, "config_cls": MT5Config, "gated": True}, {}, True),
}


def batch_of(family: str, **options: Any) -> dict[str, Tensor]:
    return models.pair(**options) if family == "t5" else models.batch(**options)


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_tp_2_equals_the_dense_model(rank, case):
    family, built_with, options, padded = CASES[case]
    vocab = built_with.get("vocab", models.VOCABULARY)
    batches = [batch_of(family, vocab=vocab, seed=seed, padded=padded) for seed in range(4)]
    check(getattr(models, family)(**built_with), family, options, batches)


def check(model: Any, schedule: str, options: dict[str, Any], batches: list[dict[str, Any]]) -> None:
    """4 AdamW steps, clipped: losses, all gradients of the first, norms, outputs, parameters after the last."""
    mesh = Mesh(dp=dist.get_world_size() // 2, tp=2)
    settings = {"schedule_args": options, "steps": 4, "dtype": torch.float64, "max_norm": 0.5}
    report = verify(model, schedule, mesh, batches, **settings)
    assert report.ok, str(report)
    assert report.worst("loss").tolerance == 1e-9
    dense = copy.deepcopy(model)
    dense(**batches[0]).loss.backward()
    compared = {difference.name for difference in report.differences if difference.what == "gradient"}
    assert compared == {name for name, parameter in dense.named_parameters() if parameter.grad is not None}
    compared = {difference.name for difference in report.differences if difference.what == "parameter"}
    assert compared == set(model.state_dict())


def two_choices(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each of two questions."""
    return {name: value.view(2, 2, -1) for name, value in batch.items()}


# the head, and a batch for it made out of one of words
TASKS: dict[str, tuple[Any, Any]] = {
    "pretraining": (BertForPreTraining, lambda b: {**b, "next_sentence_label": torch.tensor([0, 1, 1, 0])}),
    "next sentence": (BertForNextSentencePrediction, lambda b: {**b, "labels": torch.tensor([0, 1, 1, 0])}),
    "sequences": (BertForSequenceClassification, lambda b: {**b, "labels": torch.tensor([0, 1, 1, 0])}),
    "tokens": (BertForTokenClassification, lambda b: {**b, "labels": b["labels"].clamp(max=1)}),
    "answers": (
        BertForQuestionAnswering,
        lambda b: {**without_labels(b), "start_positions": torch.arange(4), "end_positions": torch.arange(4) + 5},
    ),
    "choices": (BertForMultipleChoice, lambda b: {**two_choices(without_labels(b)), "labels": torch.tensor([0, 1])}),
}


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("task", TASKS)
@on_ranks(2)
def test_heads_of_bert_train_as_the_dense_ones(rank, task):
    cls, make = TASKS[task]
    options = SP if task in ("pretraining", "sequences") else FUSED
    batches = [make(models.batch(seed=seed, padded=True)) for seed in range(2)]
    check(models.bert(cls=cls), "bert", options, batches)


@pytest.mark.parametrize(("family", "options"), [("bert", SP), ("t5", {})])
@on_ranks(4)
def test_tp_2_dp_2_equals_the_dense_model(rank, family, options):
    batches = [batch_of(family, seed=seed, padded=True) for seed in range(2)]
    check(getattr(models, family)(), family, options, batches)


# ------------------------------------------------------------------------------------------- what calls give and cost


def both(family: str, options: dict[str, Any], **built_with: Any) -> tuple[Any, Any]:
    dense = getattr(models, family)(**built_with)
    model, _ = initialize(copy.deepcopy(dense), family, options, tp=2)
    return dense, model


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["bert", "t5"])
@on_ranks(2)
def test_every_way_to_ask_for_a_loss_gives_the_dense_one(rank, family):
    dense, model = both(family, SP)
    batch = batch_of(family, padded=True)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    decoder = {"decoder_input_ids": ids[:, :10]} if family == "t5" else {"token_type_ids": mask}
    for more in [decoder, {"inputs_embeds": dense.get_input_embeddings()(ids).detach(), "input_ids": None}]:
        close(model(**{**batch, **more}).loss, dense(**{**batch, **more}).loss)
    # by position, and a tuple
    places = {"bert": 8, "t5": 9}
    given = (ids, mask, *[None] * (places[family] - 3), labels)
    found, wanted = model(*given, return_dict=False), dense(*given, return_dict=False)
    close(found[0], wanted[0])
    assert found[1] is None
    model.eval()
    dense.eval()
    found, wanted = model(**batch), dense(**batch)
    # the loss is the first
    close(found[0], wanted.loss)
    close(found.logits, wanted.logits)
    assert list(found) == list(wanted)
    assert type(found) is type(wanted)
    inputs = {**without_labels(batch), **(decoder if family == "t5" else {})}
    close(model(**inputs).logits, dense(**inputs).logits)
    with torch.autocast("cpu", torch.bfloat16):
        close(model(**batch).loss, dense(**batch).loss, 2e-3)


@pytest.mark.parametrize("family", ["bert", "t5"])
@on_ranks(2)
def test_loss_has_the_dtype_of_the_dense_one(rank, family):
    dense, model = (each.bfloat16() for each in both(family, FUSED))
    batch = batch_of(family)
    close(model(**batch).loss, dense(**batch).loss, 2e-2)


@pytest.mark.parametrize(("family", "wrong"), [("bert", 99), ("t5", 99), ("bert", -1), ("t5", -1)])
@on_ranks(2)
def test_a_label_outside_the_vocabulary_raises_on_every_rank(rank, family, wrong):
    _, model = both(family, {})
    batch = batch_of(family)
    batch["labels"][1, 2] = wrong
    inputs = {"decoder_input_ids": batch["input_ids"][:, :10]} if family == "t5" else {}
    with pytest.raises(RuntimeError, match="a label lies outside the vocabulary of 99"):
        model(**batch, **inputs)


@on_ranks(2)
def test_encoder_output_of_the_users_own_gets_its_whole_gradient(rank):
    """T5 called with ``encoder_outputs``: every rank's heads of the cross-attentions have a part in it."""
    dense, model = (each.double() for each in both("t5", FUSED))
    batch = models.pair(padded=True)
    gradients = []
    for each in (dense, model):
        states = torch.linspace(-1, 1, 4 * 16 * 32, dtype=torch.float64).view(4, 16, 32).requires_grad_()
        each(encoder_outputs=(states,), attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.backward()
        gradients.append(states.grad)
    close(gradients[1], gradients[0], 1e-9)


@pytest.mark.parametrize("num_beams", [1, 2])
@on_ranks(2)
def test_generation_gives_the_dense_models_tokens(rank, num_beams):
    """Through the two caches of an encoder-decoder, which hold this rank's heads."""
    dense = models.t5(**GATED)
    # far from ties between the best tokens
    with torch.no_grad():
        dense.lm_head.weight.mul_(8)
    model, _ = initialize(copy.deepcopy(dense), "t5", {**FUSED, **GATE}, tp=2)
    ids = models.batch(size=2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": num_beams, "eos_token_id": None}
    wanted = dense.eval().generate(ids, attention_mask=mask, **settings)
    assert wanted.shape == (2, 9)
    assert len(wanted.unique()) > 3
    assert torch.equal(model.eval().generate(ids, attention_mask=mask, **settings), wanted)


VOCABULARY, SIZE, LENGTHS = 512, 2, {"bert": (16,), "t5": (16, 10)}


def collectives(family: str, options: dict[str, Any], layers: int) -> list[Any]:
    """Of the second step, forward and backward: the first also compares the batches of the ranks."""
    _, model = both(family, options, layers=layers, vocab=VOCABULARY)
    batch = batch_of(family, padded=True, size=SIZE, vocab=VOCABULARY)
    model(**batch)
    with Collectives() as forward:
        loss = model(**batch).loss
    with Collectives() as backward:
        loss.backward()
    return [forward.counts, backward.counts]


def activations(family: str, kind: str, layers: int, parts: int = 1) -> Any:
    """One collective of each attention and feed-forward, on this part of the activation of its stack."""
    regions = {"bert": (2,), "t5": (2, 3)}[family]
    return Counter(
        {(kind, SIZE * n * 32 // parts): count * layers for n, count in zip(LENGTHS[family], regions, strict=True)}
    )


def whole(family: str, *lengths: int) -> Any:
    return Counter(("all_reduce", SIZE * n * 32) for n in lengths or LENGTHS[family])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("family", "options"), [("bert", {}), ("bert", FUSED), ("t5", {}), ("t5", FUSED)])
@on_ranks(2)
def test_an_attention_and_a_feed_forward_sum_once_each_way(rank, family, options, layers):
    """Two and two in a block of an encoder; three and three in one of a decoder, which has two attentions."""
    forward, backward = collectives(family, options, layers)
    last = LENGTHS[family][-1]
    # the maximum of the logits; the sum of their exponentials and the logit of the target
    loss = Counter({("all_reduce", SIZE * last): 1, ("all_reduce", 2 * SIZE * last): 1})
    assert forward == activations(family, "all_reduce", layers) + whole(family) + loss
    # the head's input, and the encoder's output once for all cross-attentions
    assert backward == activations(family, "all_reduce", layers) + whole(family)


@pytest.mark.parametrize(("family", "small"), [("bert", (6,)), ("t5", (2, 3))])
@on_ranks(2)
def test_sequence_parallelism_moves_as_much_as_it_saves(rank, family, small):
    """What a further layer costs: an all-gather and a reduce-scatter are the two halves of an all-reduce."""
    (one, one_back), (two, two_back) = (collectives(family, SP, layers) for layers in (1, 2))
    halves = activations(family, "all_gather_into_tensor", 1, 2) + activations(family, "reduce_scatter_tensor", 1)
    assert two - one == halves
    # norms, and the biases that are added to a slice
    assert two_back - one_back == halves + Counter({("all_reduce", 32): sum(small)})


# ---------------------------------------------------------------------------------------------- dropout, graphs


@pytest.mark.parametrize(("family", "options"), [("bert", {}), ("bert", SP), ("t5", {}), ("t5", SP)])
@on_ranks(2)
def test_masks_agree_where_activations_do(rank, family, options):
    """Every rank seeds itself differently, as scripts that think of data parallelism do."""
    torch.manual_seed(100 + rank)
    _, model = both(family, options, dropout=0.5, layers=1, attn_implementation="eager")
    drops: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Eager attention gives its probabilities, after dropout, as the last.
            drops[name] = (output[-1] if isinstance(output, tuple) else output) == 0

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) or name.endswith((".attention.self", "SelfAttention", "EncDecAttention")):
            module.register_forward_hook(record(name))
    model(**batch_of(family))
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, drops)
    shares = {name: float((mask == everywhere[1 - rank][name]).float().mean()) for name, mask in drops.items()}
    assert all(0.3 < mask.float().mean() < 0.8 for mask in drops.values())
    agreeing = {name for name, share in shares.items() if share == 1}
    assert all(shares[name] < 0.75 for name in shares.keys() - agreeing), shares
    residual = ("attention.output.dropout", "0.output.dropout", "layer.0.dropout", "layer.1.dropout", "layer.2.dropout")
    stacks = {"bert.embeddings.dropout", "encoder.dropout", "decoder.dropout"}
    assert agreeing == {name for name in drops if name in stacks or (not options and name.endswith(residual))}


@pytest.mark.parametrize(("family", "built_with", "options"), [("bert", {}, SP), ("t5", GATED, {**FUSED, **GATE})])
@on_ranks(2)
def test_options_inside_graphs_equal_the_dense_model(rank, family, built_with, options):
    """2 SGD steps, padded and not; then evaluation."""
    dense = getattr(models, family)(layers=1, attn_implementation="eager", **built_with).double()
    model = copy.deepcopy(dense)
    in_graphs = {"efficient_attention": True, "checkpoint_attention": True, "fuse_activation": family == "bert"}
    run, scheduled = initialize(model, family, {**options, **in_graphs}, tp=2)
    recomputed = {step.path for step in scheduled.history if step.primitive.verb == "checkpoint"}
    ends = (".attention.self", "SelfAttention", "EncDecAttention")
    assert recomputed >= {name for name, _ in model.named_modules() if name.endswith(ends)}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (dense, model)]
    for step in range(2):
        batch = batch_of(family, seed=step, padded=step == 0)
        loss, wanted = run(**batch).loss, dense(**batch).loss
        close(loss, wanted, 1e-9)
        loss.backward()
        wanted.backward()
        found = gradients(scheduled)
        for name, parameter in dense.named_parameters():
            close(found[name], parameter.grad, 1e-9)
        for each in optimizers:
            each.step()
            each.zero_grad()
    batch = batch_of(family, seed=7, padded=True)
    with torch.no_grad():
        close(model.eval()(**batch).logits, dense.eval()(**batch).logits, 1e-9)


# ---------------------------------------------------------------------------------------- engines and folders


@pytest.mark.parametrize(("family", "stage"), [("bert", 1), ("t5", 1), ("bert", 3), ("t5", 3)])
@on_ranks(2)
def test_deepspeed_trains_as_the_dense_model_and_saves_what_loads(rank, tmp_path, family, stage):
    dense = getattr(models, family)()
    model = copy.deepcopy(dense)
    settings = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": settings},
    }
    engine, *_ = on_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, schedule=family, schedule_args=FUSED, tp=2
    )
    optimizer = torch.optim.AdamW(dense.parameters(), **settings)
    for step in range(3):
        batch = batch_of(family, seed=step, padded=True)
        loss, wanted = engine(**batch).loss, dense(**batch).loss
        close(loss.detach(), wanted.detach())
        engine.backward(loss)
        engine.step()
        wanted.backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    folder = Path(tmp_path) / "model"
    on_deepspeed.save_pretrained(engine, folder)
    dist.barrier()
    loaded = type(dense).from_pretrained(folder)
    for name, value in dense.state_dict().items():
        close(loaded.state_dict()[name], value, 1e-4)
