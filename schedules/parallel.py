"""Column, row and vocabulary splits that every decoder's schedule uses."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from partbook.core import Schedule

SEQUENCE = 1


def _out_axis(sch: Schedule) -> int:
    # transformers' Conv1D keeps its weight as (in, out), nn.Linear as (out, in)
    return 0 if isinstance(sch.module, nn.Linear) else 1


def column(sch: Schedule, segments: tuple[int, ...] | None = None, replicas: int = 1) -> None:
    """Split a linear along its output; its input must be whole and its gradient summed (``enter``)."""
    sch.shard("weight", axis=_out_axis(sch), segments=segments, replicas=replicas)
    if getattr(sch.module, "bias", None) is not None:
        sch.shard("bias", axis=0, segments=segments, replicas=replicas)


def row(sch: Schedule, sequence_parallel: bool) -> None:
    """Split a linear along its input and sum its partial outputs."""
    sch.shard("weight", axis=1 - _out_axis(sch))
    if sequence_parallel:
        sch.sync("fwd_post", "reduce_scatter", axis=SEQUENCE)
    else:
        sch.sync("fwd_post", "all_reduce")


def enter(region: Schedule, sequence_parallel: bool, reader: Schedule | None = None) -> None:
    """The input of a parallel region: whole in the forward pass, its gradient summed in the backward pass.

    ``reader``: the one linear that reads the input, if there is one; it overlaps the sum with its weight gradient.
    """
    if sequence_parallel:
        region.sync("fwd_pre", "all_gather", axis=SEQUENCE)
    else:
        (reader or region).sync("bwd_post", "all_reduce")


def split_vocabulary(model: Schedule, embedding: str, head: str) -> None:
    """Split embedding, head and loss over the vocabulary, padded where it does not divide; tied or not."""
    model[embedding].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    if not model[head].is_sharded("weight"):
        model[head].shard("weight", axis=0, pad=True)
    model[head].sync("bwd_post", "all_reduce")
    model.shard_loss(head)


def split_sequence(first_block: Schedule, norms: Iterable[Schedule], last_norm: Schedule) -> None:
    """Run the norms on slices of the sequence, from the first block's input to the last norm's output."""
    first_block.sync("fwd_pre", "scatter", axis=SEQUENCE)
    for norm in (*norms, last_norm):
        for name, _ in norm.module.named_parameters(recurse=False):
            norm.annotate(name, "partial_gradient", True)
    last_norm.sync("fwd_post", "all_gather", axis=SEQUENCE)
