"""Llama and its kin: tensor and sequence parallelism, grouped-query attention, fused kernels, recomputation."""

from __future__ import annotations

from partbook.core import Schedule, model_schedule

from .fused import fuse, fuse_gate_up, fuse_qkv, fused_column
from .graphs import LLAMA, fuse_and_recompute, fuse_gated_activation, fuse_norms
from .options import GatedOptions, check_heads
from .parallel import column, enter, row, split_sequence, split_vocabulary


@model_schedule("llama", models=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"))
def llama(sch: Schedule, options: GatedOptions) -> None:
    """transformers' LlamaForCausalLM and the decoders that share its module names."""
    blocks = sch.select("model.layers.*")
    for block in blocks:
        if options.fuse_qkv:
            fuse(block["self_attn"], fuse_qkv)
        if options.fuse_gate_up:
            fuse(block["mlp"], fuse_gate_up)
    if options.tensor_parallel:
        sp = options.sequence_parallel
        split_vocabulary(sch, "model.embed_tokens", "lm_head")
        for block in blocks:
            _split_attention(block["self_attn"], options)
            _split_mlp(block["mlp"], options)
        if sp:
            norms = [block[name] for block in blocks for name in ("input_layernorm", "post_attention_layernorm")]
            split_sequence(blocks[0], norms, sch["model.norm"])
    fuse_and_recompute(blocks, options, "self_attn", LLAMA, fuse_gated_activation)
    fuse_norms(sch.select("**.*norm") if options.fuse_norm else [])


def _split_attention(attn: Schedule, options: GatedOptions) -> None:
    config, tp = attn.module.config, attn.mesh.tp
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared_by = check_heads(attn, attn.path, heads, kv_heads, options.fuse_qkv)
    if options.fuse_qkv:
        fused_column(attn["qkv_proj"])
    else:
        column(attn["q_proj"])
        column(attn["k_proj"], replicas=shared_by)
        column(attn["v_proj"], replicas=shared_by)
        attn.set_attribute("num_key_value_groups", heads // tp // (kv_heads * shared_by // tp))
    enter(attn, options.sequence_parallel, reader=attn["qkv_proj"] if options.fuse_qkv else None)
    row(attn["o_proj"], options.sequence_parallel)
    if attn.module.attention_dropout:
        attn.fork_rng()


def _split_mlp(mlp: Schedule, options: GatedOptions) -> None:
    if options.fuse_gate_up:
        fused_column(mlp["gate_up_proj"])
    else:
        column(mlp["gate_proj"])
        column(mlp["up_proj"])
    enter(mlp, options.sequence_parallel, reader=mlp["gate_up_proj"] if options.fuse_gate_up else None)
    row(mlp["down_proj"], options.sequence_parallel)
