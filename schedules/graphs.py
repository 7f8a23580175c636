"""Steps inside the graphs of attention, feed-forward and norms that the schedules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from partbook.core import Match, Schedule, module

from .options import Options, checkpoint_blocks


def bias_then_activation(x: Any, bias: Any) -> Any:
    return module("*act*")(x + bias)


def gated_activation(gate: Any, up: Any) -> Any:
    return module("act*")(gate) * up


def activation_then_dropout(x: Any) -> Any:
    return module("dropout")(module("act")(x))


def rms_norm(x: Any, weight: Any, epsilon: Any, dtype: Any) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(dtype)


def norm_of_t5(x: Any, epsilon: Any) -> Any:
    """Without the weight, before which a model of a narrow dtype converts."""
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + epsilon)


def core_of_gpt2(q: Any, k: Any, v: Any, mask: Any, scale: Any, p: Any, training: Any, dtype: Any) -> Any:
    """GPT-2's eager attention: q, k, v (B, heads, S, D) -> the mixed values, and the attention weights."""
    weights = functional.softmax(torch.matmul(q, k.transpose(-1, -2)) * scale + mask, dim=-1).type(dtype)
    weights = functional.dropout(weights, p=p, training=training)
    return torch.matmul(weights, v), weights


def core_of_llama(q: Any, k: Any, v: Any, mask: Any, scale: Any, p: Any, training: Any, dtype: Any) -> Any:
    """The eager attention of Llama and its kin, whose softmax is in float32."""
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * scale + mask, dim=-1, dtype=torch.float32)
    weights = functional.dropout(weights.to(dtype), p=p, training=training)
    return torch.matmul(weights, v), weights


def efficient_core(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, p: float, training: bool, dtype: torch.dtype
) -> tuple[Tensor, None]:
    """The same by ``scaled_dot_product_attention``, which has no attention weights to show.

    A row of which every key is masked (padding on the left) gives zeros, as in transformers' own use of it. A mask of
    the lowest number would not do: the backward of the kernels takes the weight of every key in such a row for 1.
    """
    p = p if training else 0.0
    mask = _without_lowest(mask)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale), None


def core_of_bert(q: Any, k: Any, v: Any, scale: Any, p: Any, training: Any, mask: Any) -> Any:
    """An encoder's eager attention over padded sequences."""
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * scale + mask, dim=-1)
    weights = functional.dropout(weights, p=p, training=training)
    return torch.matmul(weights, v), weights


def core_of_bert_unpadded(q: Any, k: Any, v: Any, scale: Any, p: Any, training: Any) -> Any:
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * scale, dim=-1)
    weights = functional.dropout(weights, p=p, training=training)
    return torch.matmul(weights, v), weights


def core_of_t5(q: Any, k: Any, v: Any, bias: Any, scale: Any, p: Any, training: Any, mask: Any) -> Any:
    """T5's eager attention, with its position ``bias`` (1, heads, S, S)."""
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * scale + bias + mask, dim=-1)
    weights = functional.dropout(weights, p=p, training=training)
    return torch.matmul(weights, v), weights


def core_of_t5_unpadded(q: Any, k: Any, v: Any, bias: Any, scale: Any, p: Any, training: Any) -> Any:
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * scale + bias, dim=-1)
    weights = functional.dropout(weights, p=p, training=training)
    return torch.matmul(weights, v), weights


def efficient_core_of_bert(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``efficient_core`` where a mask may be missing."""
    p = p if training else 0.0
    mask = None if mask is None else _without_lowest(mask)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale), None


def efficient_core_of_t5(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, p: float, training: bool, mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """The position bias is part of the mask, through which its gradient comes."""
    p = p if training else 0.0
    mask = bias if mask is None else bias + _without_lowest(mask)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale), None


def _without_lowest(mask: Tensor) -> Tensor:
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))


# The eager attention of each family: its patterns, and what takes their place.
Cores = dict[Callable[..., Any], Callable[..., Any]]
GPT2: Cores = {core_of_gpt2: efficient_core}
LLAMA: Cores = {core_of_llama: efficient_core}
BERT: Cores = dict.fromkeys((core_of_bert, core_of_bert_unpadded), efficient_core_of_bert)
T5: Cores = dict.fromkeys((core_of_t5, core_of_t5_unpadded), efficient_core_of_t5)


def fuse_and_recompute(
    blocks: list[Schedule],
    options: Options,
    attention: str,
    cores: Cores,
    fuse_activation: Callable[[Schedule], None],
    feed_forward: str = "mlp",
) -> None:
    """The options of every family that act inside blocks, on the modules below a block that the two globs match."""
    for block in blocks:
        if options.fuse_activation:
            for mlp in block.select(feed_forward):
                fuse_activation(mlp)
        if options.efficient_attention:
            for attn in block.select(attention):
                use_efficient_attention(attn, cores)
    for block in checkpoint_blocks(blocks, options.checkpoint_ratio):
        if options.checkpoint_attention:
            for attn in block.select(attention):
                checkpoint_core(attn, cores)


def fuse_bias_activation(mlp: Schedule, linear: str = "c_fc") -> None:
    """The bias of ``linear`` and the activation after it in one kernel."""
    mlp[linear].decompose()
    mlp.fuse(mlp.match(bias_then_activation))


def fuse_gated_activation(mlp: Schedule) -> None:
    """The activation of the gate and its product with the up projection in one kernel."""
    mlp.fuse(mlp.match(gated_activation))


def fuse_activation_dropout(mlp: Schedule) -> None:
    """An activation without a bias before it, and its dropout, in one kernel."""
    mlp.fuse(mlp.match(activation_then_dropout))


def fuse_norms(norms: list[Schedule], pattern: Callable[..., Any] = rms_norm) -> None:
    """Each RMS norm in one kernel."""
    for norm in norms:
        norm.fuse(norm.match(pattern))


def use_efficient_attention(attn: Schedule, cores: Cores) -> None:
    """Put ``scaled_dot_product_attention`` in the place of the model's own code, unless that uses it already."""
    if not attn.find(node=_is_efficient):
        for pattern, efficient in _present(attn, cores).items():
            attn.replace(efficient, at=attn.match(pattern))


def checkpoint_core(attn: Schedule, cores: Cores) -> None:
    """Recompute the core of the attention only: it keeps most of a block's activations and costs little of its time.

    Selective activation recomputation, Korthikanti et al. 2022 (arXiv:2205.05198, section 5).
    """
    efficient: list[Match] = attn.find(node=_is_efficient)
    for match in efficient[:1] or [attn.match(pattern) for pattern in _present(attn, cores)]:
        attn.checkpoint(at=match)


def _present(attn: Schedule, cores: Cores) -> Cores:
    """The patterns that this attention has, with a padding mask or without; where it has none the first, whose
    ``match`` then says how near it came."""
    found = {pattern: efficient for pattern, efficient in cores.items() if attn.find(pattern)}
    return found or dict(list(cores.items())[:1])


def _is_efficient(node: fx.Node) -> bool:
    own = (efficient_core, efficient_core_of_bert, efficient_core_of_t5)
    return node.target in (functional.scaled_dot_product_attention, *own)
