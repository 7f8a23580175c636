"""BERT: tensor and sequence parallelism, vocabulary split, fused kernels, recomputation."""

from __future__ import annotations

import functools

from partbook.core import Schedule, model_schedule

from .fused import fuse, fuse_qkv, fused_column
from .graphs import BERT, fuse_and_recompute, fuse_bias_activation
from .options import Options, check_heads, refuse
from .parallel import column, enter, row, split_embeddings, split_sequence, split_vocabulary

WORDS, HEAD, ATTENTION = "embeddings.word_embeddings", "cls.predictions.decoder", "attention.self"
HEADS = ("MaskedLM", "PreTraining", "NextSentencePrediction")
TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


@model_schedule("bert", models=("BertModel", *(f"BertFor{head}" for head in (*HEADS, *TASKS))))
def bert(sch: Schedule, options: Options) -> None:
    """transformers' BERT as an encoder, with any head. The loss of BertForPreTraining needs its logits whole."""
    prefix, sp = "bert." if "bert" in sch else "", options.sequence_parallel
    blocks = sch.select(f"{prefix}encoder.layer.*")
    for block in blocks if options.fuse_qkv else ():
        fuse(block[ATTENTION], fuse_qkv)
    if options.tensor_parallel:
        if HEAD in sch:
            split_vocabulary(sch, prefix + WORDS, HEAD, labels=None if "cls.seq_relationship" in sch else "same")
        else:
            split_embeddings(sch, prefix + WORDS)
        for block in blocks:
            _split_block(block, options)
        if sp:
            norms = [block[name] for block in blocks for name in ("attention.output.LayerNorm", "output.LayerNorm")]
            split_sequence(blocks[0], norms, blocks[-1])
    fuse_activation = functools.partial(fuse_bias_activation, linear="dense")
    fuse_and_recompute(blocks, options, ATTENTION, BERT, fuse_activation, feed_forward="intermediate")


def _split_block(block: Schedule, options: Options) -> None:
    attn, up, sp = block[ATTENTION], block["intermediate"], options.sequence_parallel
    heads = attn.module.num_attention_heads
    check_heads(attn, attn.path, heads, heads)
    if "crossattention" in block:
        refuse(block, block.path, "its cross-attention has no rule", "tensor_parallel=False")
    if options.fuse_qkv:
        fused_column(attn["qkv_proj"])
    for name in ("query", "key", "value") if not options.fuse_qkv else ():
        column(attn[name])
    enter(attn, sp, reader=attn["qkv_proj"] if options.fuse_qkv else None)
    column(up["dense"])
    enter(up, sp, reader=up["dense"])
    for part in (block["attention.output"], block["output"]):
        row(part["dense"], sp)
        # on a slice of the sequence
        if sp and part.module.dropout.p:
            part.fork_rng()
    if attn.module.dropout.p:
        attn.fork_rng()
