"""The options that the schedules share, and the checks that they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partbook.core import Problem, Schedule, ScheduleError, user_line


@dataclass(frozen=True, kw_only=True)
class Options:
    """``tensor_parallel``: split attention, feed-forward and vocabulary over the tp ranks. ``sequence_parallel``: split
    the sequence between them too. ``fuse_qkv``: one matrix product for q, k and v. ``fuse_activation``: one kernel for
    the activation of the feed-forward and what surrounds it. ``efficient_attention``: scaled_dot_product_attention,
    also where the model's own code does not use it. ``checkpoint_ratio``: the share of blocks (0 to 1) that are
    recomputed in the backward pass; ``checkpoint_attention``: the core of the attention is, in the other blocks."""

    tensor_parallel: bool = True
    sequence_parallel: bool = False
    fuse_qkv: bool = False
    fuse_activation: bool = False
    efficient_attention: bool = False
    checkpoint_ratio: float = 0.0
    checkpoint_attention: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedOptions(Options):
    """``fuse_gate_up``: one matrix product for the gate and the up projection. ``fuse_norm``: one kernel a norm."""

    fuse_gate_up: bool = False
    fuse_norm: bool = False


def refuse(sch: Schedule, path: str, found: str, hint: str = "") -> None:
    """Raise ScheduleError for ``path``: what the schedule cannot do with this model."""
    raise ScheduleError(f"sch[{path!r}]", [Problem(found, hint)], user_line())


def check_heads(sch: Schedule, path: str, heads: int, kv_heads: int, fused: bool = False) -> int:
    """How many neighbouring ranks share each kv head; refuses heads that cannot be split, naming the module."""
    tp = sch.mesh.tp
    if heads % tp:
        refuse(sch, path, f"its {heads} attention heads do not divide by tp={tp}", f"tp must divide {heads}")
    if kv_heads % tp == 0:
        return 1
    if tp % kv_heads:
        refuse(sch, path, f"its {kv_heads} key-value heads neither divide by tp={tp} nor into it")
    if fused:
        refuse(
            sch,
            path,
            f"its {kv_heads} key-value heads are shared by tp={tp} ranks, which a fused QKV cannot do",
            "fuse_qkv=False",
        )
    return tp // kv_heads


def checkpoint_blocks(blocks: list[Schedule], ratio: Any) -> list[Schedule]:
    """Recompute this share of the blocks, spread evenly, the first ones first; gives the other blocks."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"checkpoint_ratio={ratio} is not between 0 and 1")
    kept = []
    for i, block in enumerate(blocks):
        if int((i + 1) * ratio + 1e-9) > int(i * ratio + 1e-9):
            block.checkpoint()
        else:
            kept.append(block)
    return kept
