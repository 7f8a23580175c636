"""Llama and its kin: tensor and sequence parallelism, grouped-query attention, fused QKV, recomputation."""

from __future__ import annotations

from partbook.core import Schedule, model_schedule

from .fused import fuse_qkv, qkv_mapping
from .options import Options, check_heads, checkpoint_blocks
from .parallel import column, enter, row, split_sequence, split_vocabulary


@model_schedule("llama", models=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"))
def llama(sch: Schedule, options: Options) -> None:
    """transformers' LlamaForCausalLM and the decoders that share its module names."""
    blocks = sch.select("model.layers.*")
    if options.fuse_qkv:
        for block in blocks:
            attn = block["self_attn"]
            attn.replace(fuse_qkv, qkv_mapping(attn.module))
    if options.tensor_parallel:
        sp = options.sequence_parallel
        split_vocabulary(sch, "model.embed_tokens", "lm_head")
        for block in blocks:
            _split_attention(block["self_attn"], options)
            _split_mlp(block["mlp"], sp)
        if sp:
            norms = [block[name] for block in blocks for name in ("input_layernorm", "post_attention_layernorm")]
            split_sequence(blocks[0], norms, sch["model.norm"])
    checkpoint_blocks(blocks, options.checkpoint_ratio)


def _split_attention(attn: Schedule, options: Options) -> None:
    config, tp = attn.module.config, attn.mesh.tp
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared_by = check_heads(attn, attn.path, heads, kv_heads, options.fuse_qkv)
    enter(attn, options.sequence_parallel)
    if options.fuse_qkv:
        sizes = attn["qkv_proj"].module.sizes
        column(attn["qkv_proj"], segments=sizes)
        attn["qkv_proj"].set_attribute("sizes", tuple(size // tp for size in sizes))
    else:
        column(attn["q_proj"])
        column(attn["k_proj"], replicas=shared_by)
        column(attn["v_proj"], replicas=shared_by)
        attn.set_attribute("num_key_value_groups", heads // tp // (kv_heads * shared_by // tp))
    row(attn["o_proj"], options.sequence_parallel)
    if attn.module.attention_dropout:
        attn.fork_rng()


def _split_mlp(mlp: Schedule, sp: bool) -> None:
    enter(mlp, sp)
    column(mlp["gate_proj"])
    column(mlp["up_proj"])
    row(mlp["down_proj"], sp)
