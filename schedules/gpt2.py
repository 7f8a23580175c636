"""GPT-2: tensor and sequence parallelism, vocabulary split, fused kernels, recomputation."""

from __future__ import annotations

from typing import Any

from torch import nn

from partbook.core import Schedule, model_schedule, transpose

from .graphs import GPT2, fuse_and_recompute, fuse_bias_activation
from .options import Options, check_heads
from .parallel import column, enter, row, split_sequence, split_vocabulary


@model_schedule("gpt2", models=("GPT2LMHeadModel",))
def gpt2(sch: Schedule, options: Options) -> None:
    """transformers' GPT2LMHeadModel. Its c_attn is q, k and v in one; ``fuse_qkv`` makes it an ``nn.Linear``."""
    blocks = sch.select("transformer.h.*")
    if options.fuse_qkv:
        for block in blocks:
            block["attn.c_attn"].replace(linear_of, {"weight": transpose("weight")})
    if options.tensor_parallel:
        sp = options.sequence_parallel
        split_vocabulary(sch, "transformer.wte", "lm_head")
        for block in blocks:
            _split_block(block, sp)
        if sp:
            norms = [block[name] for block in blocks for name in ("ln_1", "ln_2")]
            split_sequence(blocks[0], norms, sch["transformer.ln_f"])
    fuse_and_recompute(blocks, options, "attn", GPT2, fuse_bias_activation)


def _split_block(block: Schedule, sp: bool) -> None:
    attn, mlp, hidden = block["attn"], block["mlp"], block["attn"].module.embed_dim
    heads = attn.module.num_heads
    check_heads(attn, attn.path, heads, heads)
    # q, k and v lie side by side: each is split by itself
    column(attn["c_attn"], segments=(hidden, hidden, hidden))
    enter(attn, sp, reader=attn["c_attn"])
    attn.set_attribute("split_size", hidden // attn.mesh.tp)
    row(attn["c_proj"], sp)
    column(mlp["c_fc"])
    enter(mlp, sp, reader=mlp["c_fc"])
    row(mlp["c_proj"], sp)
    # the residual is replicated, or a slice of the sequence
    if attn.module.attn_dropout.p or attn.module.resid_dropout.p:
        attn.fork_rng(shared=() if sp else ("resid_dropout",))
    if sp and mlp.module.dropout.p:
        mlp.fork_rng()


def linear_of(conv: Any) -> nn.Linear:
    """An ``nn.Linear`` of the shape of a transformers' Conv1D."""
    return nn.Linear(conv.nx, conv.nf, device="meta", dtype=conv.weight.dtype)
