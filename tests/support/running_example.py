"""The running example: the attention of BERT from clean to fused, efficient and split; and the untouched model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from partbook.core import Schedule, cat, module

ATTENTION = "bert.encoder.layer.*.attention"


def model() -> Any:
    """A BERT in float64 without dropout, with the same weights in every call; its attention is written out."""
    bert = zoo.make("bert", "eager")
    for each in bert.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return bert


def batches() -> list[dict[str, Tensor]]:
    """With padding and without."""
    return [zoo.tokens(3, 11), zoo.tokens(3, 11, padded=False)]


def qkv(x: Any) -> Any:
    return module("query")(x), module("key")(x), module("value")(x)


def fused(attn: Any) -> nn.Linear:
    query = attn.query
    return nn.Linear(query.in_features, 3 * query.out_features, device="meta", dtype=query.weight.dtype)


def fuse_qkv(attn: Schedule) -> None:
    made_of = {name: cat([f"query.{name}", f"key.{name}", f"value.{name}"]) for name in ("weight", "bias")}
    attn.replace(fused, made_of, at=attn.match(qkv), name="qkv")


def masked(q: Any, k: Any, v: Any, scale: Any, p: Any, training: Any, mask: Any) -> Any:
    probs = F.softmax(torch.matmul(q, k.transpose(2, 3)) * scale + mask, dim=-1)
    probs = F.dropout(probs, p=p, training=training)
    return torch.matmul(probs, v), probs


def unmasked(q: Any, k: Any, v: Any, scale: Any, p: Any, training: Any) -> Any:
    probs = F.softmax(torch.matmul(q, k.transpose(2, 3)) * scale, dim=-1)
    probs = F.dropout(probs, p=p, training=training)
    return torch.matmul(probs, v), probs


def efficient(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, mask: Tensor | None = None
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, mask, p if training else 0.0, scale=scale), None


def use_efficient_attention(attn: Schedule) -> None:
    for pattern in (masked, unmasked):
        attn.replace(efficient, at=attn.match(pattern))


def split(attention: Schedule, *, backward_sum: bool = True) -> None:
    attn, dense = attention["self"], attention["output.dense"]
    width = dense.module.in_features
    for name in ("weight", "bias"):
        attn["qkv"].shard(name, axis=0, segments=(width, width, width))
    if backward_sum:
        attn["qkv"].sync("bwd_post", "all_reduce")
    dense.shard("weight", axis=1).sync("fwd_post", "all_reduce")
    attn.fork_rng()


def schedule(sch: Schedule, *, backward_sum: bool = True) -> None:
    for attention in sch.find(ATTENTION):
        fuse_qkv(attention["self"])
        use_efficient_attention(attention["self"])
        split(attention, backward_sum=backward_sum)
