"""T5: encoder and decoder, tensor and sequence parallelism, vocabulary split, fused kernels, recomputation."""

from __future__ import annotations

from torch import nn

from partbook.core import Schedule, model_schedule

from .fused import FusedLinear, fuse, fuse_gate_up, fuse_kv, fuse_qkv, fused_column
from .graphs import T5, fuse_activation_dropout, fuse_and_recompute, fuse_gated_activation, fuse_norms, norm_of_t5
from .options import GatedOptions, check_heads, refuse
from .parallel import column, enter, row, split_sequence, split_vocabulary

EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
ATTENTION, FEED_FORWARD = "layer.*.*Attention", "layer.*.DenseReluDense"


@model_schedule("t5", models=("T5ForConditionalGeneration", "MT5ForConditionalGeneration"))
def t5(sch: Schedule, options: GatedOptions) -> None:
    """transformers' T5, its feed-forward with a gate or without, and mT5."""
    blocks, sp = sch.select("*.block.*"), options.sequence_parallel
    [first] = blocks[0].select(FEED_FORWARD)
    if options.fuse_gate_up and "wi_1" not in first:
        refuse(first, first.path, "its feed-forward has no gate", "fuse_gate_up=False")
    for attn in sch.select(f"*.block.*.{ATTENTION}") if options.fuse_qkv else []:
        # keys and values of a cross-attention read the encoder's output
        fuse(attn, fuse_kv if "EncDec" in attn.path else fuse_qkv)
    for mlp in sch.select(f"*.block.*.{FEED_FORWARD}") if options.fuse_gate_up else []:
        fuse(mlp, fuse_gate_up)
    if options.tensor_parallel:
        split_vocabulary(sch, EMBEDDINGS, "lm_head", labels="same")
        # once for the heads of all cross-attentions
        sch["decoder"].sync("bwd_post", "all_reduce", argument="encoder_hidden_states")
        for layer in sch.select("*.block.*.layer.*"):
            _split_layer(layer, sp)
        for stack in (sch["encoder"], sch["decoder"]) if sp else ():
            split_sequence(stack["block.0"], stack.select("block.*.layer.*.layer_norm"), stack["final_layer_norm"])
    activation = fuse_gated_activation if "wi_1" in first else fuse_activation_dropout
    fuse_and_recompute(blocks, options, ATTENTION, T5, activation, FEED_FORWARD)
    fuse_norms(sch.select("**.*layer_norm") if options.fuse_norm else [], norm_of_t5)


def _split_layer(layer: Schedule, sp: bool) -> None:
    [region] = [*layer.find("*Attention"), *layer.find("DenseReluDense")]
    if heads := getattr(region.module, "n_heads", 0):
        check_heads(region, region.path, heads, heads)
        region.set_attribute("n_heads", heads // region.mesh.tp)
    readers = []
    for part in region:
        name = part.path.rpartition(".")[2]
        if name in ("o", "wo"):
            row(part, sp)
        elif name == "relative_attention_bias":
            part.shard("weight", axis=1)
        elif isinstance(part.module, nn.Linear):
            (fused_column if isinstance(part.module, FusedLinear) else column)(part)
            readers += [part] if "EncDec" not in part.path or name == "q" else []
    enter(region, sp, reader=readers[0] if len(readers) == 1 else None, argument="hidden_states")
    if layer.module.dropout.p:
        (layer if sp else region).fork_rng()
