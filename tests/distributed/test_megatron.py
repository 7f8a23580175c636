"""What Megatron asks of a model: attributes at every place of a pipeline, layers, streams, collectives, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import megatron_training as megatron
import models
from counting import Collectives
from forks import forked, recomputed_inside
from partbook.dialects.megatron import (
    gradients,
    model_provider,
    parallel_layers,
    transformer_config,
)
from ranks import on_ranks


def meta(dense: nn.Module) -> Any:
    def build() -> nn.Module:
        with torch.device("meta"):
            return type(dense)(dense.config)

    return build


def chunks_of(dense: nn.Module, family: str, vp: int | None = None, **options: Any) -> list[Any]:
    return megatron.provide(model_provider(meta(dense), family, weights=dense, **options), vp)


# ---------------------------------------------------------------------- the contract


@pytest.mark.parametrize("vp", [None, 2])
@on_ranks(2)
def test_a_stage_has_what_megatron_reads(rank: int, vp: int | None) -> None:
    megatron.start(pp=2, vp=vp)
    chunks = chunks_of(models.gpt2(layers=4), "gpt2", vp, config={"init_method_std": 0.5})
    assert [chunk.vp_stage for chunk in chunks] == ([None] if vp is None else [0, 1])
    count = 2 * (vp or 1)
    for i, chunk in enumerate(chunks):
        number = 2 * i + rank
        assert isinstance(chunk.config, TransformerConfig)
        assert (chunk.config.hidden_size, chunk.config.num_layers, chunk.config.num_attention_heads) == (32, 4, 4)
        assert chunk.config.init_method_std == 0.5
        assert not chunk.config.variable_seq_lengths
        assert chunk.model_type is ModelType.encoder_or_decoder
        assert (chunk.pre_process, chunk.post_process) == (number == 0, number == count - 1)
        assert chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight()
        assert (weight is not None) == (number in (0, count - 1))
        if weight is not None:
            assert weight.shared_embedding
            assert getattr(weight, "shared", False) is (number == count - 1)


@on_ranks(1)
def test_every_way_in_which_megatron_asks_for_a_model(rank: int) -> None:
    megatron.start()
    groups, dense = ProcessGroupCollection.use_mpu_process_groups(), models.llama()
    config = transformer_config(dense.config)
    provider = model_provider(meta(dense), "llama", weights=dense)
    calls: list[Callable[[], Any]] = [
        provider,
        lambda: provider(True, True),
        # 0.12, 0.13, 0.16
        lambda: provider(pre_process=True, post_process=True, add_encoder=True, add_decoder=True),
        lambda: provider(pre_process=True, post_process=True, vp_stage=None),
        lambda: provider(pre_process=True, post_process=True, config=None, pg_collection=groups),
        lambda: provider(pre_process=True, post_process=True, config=config, pg_collection=groups),
        # Megatron-Bridge
        provider.provide,
        lambda: provider.provide(pre_process=None, post_process=None, vp_stage=None),
    ]
    ids = models.batch()["input_ids"]
    for call in calls:
        stage = call()
        assert isinstance(stage, MegatronModule)
        torch.testing.assert_close(stage(ids), dense(ids).logits)
    assert provider(config=config).config is config


@on_ranks(2)
def test_boundaries_are_sequence_first_and_losses_those_of_tokens(rank: int) -> None:
    megatron.start(pp=2)
    dense = models.gpt2(layers=2).eval()
    [stage] = chunks_of(dense, "gpt2")
    stage.eval()
    batch = models.batch(size=2, length=12)
    with torch.no_grad():
        stage.set_input_tensor([None])
        if rank == 0:
            hidden = stage(batch["input_ids"])
            assert hidden.shape == (12, 2, 32)
            assert hidden._base is None
            dist.send(hidden, 1)
            return
        hidden = torch.empty(12, 2, 32)
        dist.recv(hidden, 0)
        labels = torch.roll(batch["input_ids"], -1, dims=1)
        labels[0, :3] = -100
        wanted = dense(batch["input_ids"]).logits
        stage.set_input_tensor([hidden])
        # Megatron's loaders give labels to the last stage, and no ids.
        torch.testing.assert_close(stage(None, None, None), wanted)
        stage.set_input_tensor([hidden])
        losses = stage(None, None, None, labels=labels)
        exact = nn.functional.cross_entropy(wanted.transpose(1, 2), labels, reduction="none")
        torch.testing.assert_close(losses, exact)
        assert losses.shape == (2, 12)


@on_ranks(2)
def test_a_micro_batch_of_one_sends_no_view(rank: int) -> None:
    megatron.start(pp=2)
    dense = models.llama(layers=2)
    training = megatron.train("llama", dense)
    batches = [models.batch(size=1, length=12, seed=seed) for seed in range(2)]
    loss, _ = training.step(batches)
    wanted = sum(dense(**batch).loss for batch in batches) / 2
    torch.testing.assert_close(loss, wanted.detach())


@on_ranks(2)
def test_sharded_modules_are_megatrons_own_layers_with_its_marks(rank: int) -> None:
    megatron.start(tp=2)
    [stage] = chunks_of(models.gpt2(), "gpt2", schedule_args={"fuse_qkv": False})
    layers = dict(parallel_layers(stage))
    assert isinstance(layers["transformer.wte"], VocabParallelEmbedding)
    block = "transformer.h.0."
    for name, kind in (
        ("attn.c_attn", "column"),
        ("attn.c_proj", "row"),
        ("mlp.c_fc", "column"),
        ("mlp.c_proj", "row"),
    ):
        layer = layers[block + name]
        assert isinstance(layer, ColumnParallelLinear if kind == "column" else RowParallelLinear)
        assert layer.weight.tensor_model_parallel
        assert layer.weight.partition_dim == (0 if kind == "column" else 1)
        assert layer.bias.tensor_model_parallel is (kind == "column")
    # The input gradient is summed while the weight's is computed.
    assert layers[block + "attn.c_attn"].allreduce_dgrad
    assert layers[block + "attn.c_attn"].weight.partition_stride == 3
    assert isinstance(layers["lm_head"], ColumnParallelLinear)
    assert stage.transformer.wte.weight is stage.lm_head.weight
    assert stage.transformer.wte.weight.is_embedding_or_output_parameter
    assert stage.transformer.wte.weight.zero_out_wgrad
    assert not hasattr(stage.transformer.wpe.weight, "is_embedding_or_output_parameter")
    assert not stage.transformer.ln_f.weight.tensor_model_parallel
    assert stage.state_dict().keys() == models.gpt2().state_dict().keys()


@on_ranks(2)
def test_norms_under_sequence_parallelism_carry_megatrons_mark(rank: int) -> None:
    megatron.start(tp=2)
    [stage] = chunks_of(models.gpt2(), "gpt2", config={"sequence_parallel": True})
    marked = {name for name, p in stage.named_parameters() if getattr(p, "sequence_parallel", False)}
    names = {name for name, _ in stage.named_parameters()}
    assert marked == {name for name in names if "ln_" in name or name.endswith("c_proj.bias")}


@on_ranks(1)
def test_frequencies_keep_their_dtype_in_a_float16_module(rank: int) -> None:
    """bfloat16 rotary frequencies are off by 0.6 at position 512."""
    megatron.start()
    dense = models.llama()
    [stage] = chunks_of(dense, "llama", config={"bf16": True})
    wanted = dense.model.rotary_emb.inv_freq
    wrapped = Float16Module(stage.config, stage)
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    assert torch.equal(stage.model.rotary_emb.inv_freq, wanted)


@pytest.mark.parametrize("cuts", ["decoder.block.0", "encoder.block.0"])
@on_ranks(2)
def test_packed_boundaries_follow_the_batch(rank: int, cuts: str) -> None:
    """An evaluation, and batches without a mask, have wirings of their own."""
    megatron.start(pp=2)
    dense = models.t5().train()
    training = megatron.train("t5", dense, cuts=cuts)
    for padded in (True, False):
        batches = [part for [part] in megatron.batches_of(0, padded=padded)]
        for is_training in (True, False):
            [training] = [training] if padded else [megatron.train("t5", dense, cuts=cuts)]
            for module in (dense, *training.chunks):
                module.train(is_training)
            with torch.set_grad_enabled(is_training):
                found = training.run(batches, forward_only=not is_training)
                wanted = torch.stack([dense(**batch).loss for batch in batches]).mean()
            torch.testing.assert_close(found, wanted.detach())


@on_ranks(2)
def test_padded_columns_of_logits_win_nothing(rank: int) -> None:
    megatron.start(tp=2)
    dense = models.gpt2(vocab=99).eval()
    [stage] = chunks_of(dense, "gpt2")
    stage.eval()
    ids = models.batch()["input_ids"]
    with torch.no_grad():
        logits, wanted = stage(ids), dense(ids).logits
        whole = stage(ids, runtime_gather_output=True)
    torch.testing.assert_close(whole, wanted)
    assert logits.shape[-1] == 50
    assert bool((logits[..., 49] == torch.finfo(logits.dtype).min).all()) is (rank == 1)


@on_ranks(2)
def test_an_evaluation_has_no_gradients_and_the_models_loss(rank: int) -> None:
    megatron.start(pp=2)
    dense = models.gpt2(dropout=0.5).eval()
    training = megatron.train("gpt2", dense)
    for chunk in training.chunks:
        chunk.eval()
    batches = [part for [part] in megatron.batches_of(0)]
    with torch.no_grad():
        loss = training.run(batches, forward_only=True)
        torch.testing.assert_close(loss, torch.stack([dense(**batch).loss for batch in batches]).mean())


# ---------------------------------------------------------------------- streams and recomputation


def gradients_of_one_step(options: dict[str, Any], schedule: Any = "gpt2") -> dict[str, Tensor]:
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    training = megatron.train(schedule, models.gpt2(dropout=0.3), options=options)
    found: dict[str, Tensor] = {}
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    training.step([part for [part] in megatron.batches_of(0)], lambda: found.update(gradients(training.chunks)))
    return found


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
@on_ranks(2)
def test_recomputation_replays_the_trackers_streams(rank: int, options: dict[str, Any]) -> None:
    megatron.start(tp=2)
    kept = gradients_of_one_step(options)
    recomputed = gradients_of_one_step({**options, "checkpoint_ratio": 1.0})
    for name, grad in kept.items():
        assert torch.equal(grad, recomputed[name]), name


@on_ranks(2)
def test_recomputing_inside_a_forked_region_replays_the_stream_around_it(rank: int) -> None:
    megatron.start(tp=2)
    kept, recomputed = (gradients_of_one_step({}, schedule=schedule) for schedule in (forked, recomputed_inside))
    for name, grad in kept.items():
        assert torch.equal(grad, recomputed[name]), name


@on_ranks(2)
def test_dropout_differs_between_ranks_where_activations_are_split_only(rank: int) -> None:
    megatron.start(tp=2)
    [stage] = chunks_of(models.gpt2(dropout=0.5, attn_implementation="eager"), "gpt2")
    masks: dict[str, Tensor] = {}
    for name in ("attn", "attn.resid_dropout", "mlp.dropout"):

        def record(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            # Eager attention gives its probabilities, after dropout, beside its output; above the diagonal all are 0.
            kept = output[1][..., *torch.tril_indices(12, 12)] if isinstance(output, tuple) else output
            masks[name] = kept == 0

        stage.transformer.h[0].get_submodule(name).register_forward_hook(record)
    stage(models.batch(length=12)["input_ids"])
    equal = {}
    for name, mask in masks.items():
        assert 0.4 < mask.float().mean() < 0.6, name
        both = [torch.empty_like(mask) for _ in range(2)]
        dist.all_gather(both, mask)
        equal[name] = float((both[0] == both[1]).float().mean())
    assert equal["attn.resid_dropout"] == equal["mlp.dropout"] == 1
    assert equal["attn"] < 0.65


# ---------------------------------------------------------------------- collectives


def of_one_step(training: megatron.Training) -> Collectives:
    counted = Collectives()
    batches = [part for [part] in megatron.batches_of(0)]
    training.step(batches)
    with counted:
        training.run(batches)
    return counted


@on_ranks(2)
def test_no_more_collectives_and_bytes_than_megatrons_own_model(rank: int) -> None:
    megatron.start(tp=2)
    vocabulary = 100
    dense = models.llama(vocab=vocabulary, kv_heads=4, attention_bias=False, mlp_bias=False)
    ours = of_one_step(megatron.train("llama", dense, options={"fuse_qkv": True, "fuse_gate_up": True}))
    config = transformer_config(
        dense.config, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
        activation_func=nn.functional.silu, perform_initialization=True, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    own = GPTModel(
        config, spec, vocab_size=vocabulary, max_sequence_length=32, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    theirs = of_one_step(megatron.wrap([own]))
    assert sum(ours.counts.values()) == sum(theirs.counts.values())
    size = lambda counts: sum(elements * times for (_, elements), times in counts.items())  # noqa: E731
    assert size(ours.counts) <= size(theirs.counts)
