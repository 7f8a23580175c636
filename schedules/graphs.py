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
    return module("act")(x + bias)


def gated_activation(gate: Any, up: Any) -> Any:
    return module("act_fn")(gate) * up


def rms_norm(x: Any, weight: Any, epsilon: Any, dtype: Any) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(dtype)


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
    mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))
    p = p if training else 0.0
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale), None


def fuse_and_recompute(
    blocks: list[Schedule],
    options: Options,
    attention: str,
    core: Callable[..., Any],
    fuse_activation: Callable[[Schedule], None],
) -> None:
    """The options of every family that act inside blocks. ``core`` is the pattern of the family's eager attention."""
    for block in blocks:
        if options.fuse_activation:
            fuse_activation(block["mlp"])
        if options.efficient_attention:
            use_efficient_attention(block[attention], core)
    for block in checkpoint_blocks(blocks, options.checkpoint_ratio):
        if options.checkpoint_attention:
            checkpoint_core(block[attention], core)


def fuse_bias_activation(mlp: Schedule) -> None:
    """GPT-2's first bias and the activation after it in one kernel."""
    mlp["c_fc"].decompose()
    mlp.fuse(mlp.match(bias_then_activation))


def fuse_gated_activation(mlp: Schedule) -> None:
    """The activation of the gate and its product with the up projection in one kernel."""
    mlp.fuse(mlp.match(gated_activation))


def fuse_norms(norms: list[Schedule]) -> None:
    """Each RMS norm in one kernel."""
    for norm in norms:
        norm.fuse(norm.match(rms_norm))


def use_efficient_attention(attn: Schedule, core: Callable[..., Any]) -> None:
    """Put ``scaled_dot_product_attention`` in the place of the model's own code, unless that uses it already."""
    if not attn.find(node=_is_efficient):
        attn.replace(efficient_core, at=attn.match(core))


def checkpoint_core(attn: Schedule, core: Callable[..., Any]) -> None:
    """Recompute the core of the attention only: it keeps most of a block's activations and costs little of its time.

    Selective activation recomputation, Korthikanti et al. 2022 (arXiv:2205.05198, section 5).
    """
    efficient: list[Match] = attn.find(node=_is_efficient)
    attn.checkpoint(at=efficient[0] if efficient else attn.match(core))


def _is_efficient(node: fx.Node) -> bool:
    return node.target in (functional.scaled_dot_product_attention, efficient_core)
