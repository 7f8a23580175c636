"""Column, row and vocabulary splits that the schedules of all families use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from partbook.core import Schedule

Labels = Literal["next", "same"]

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


def enter(
    region: Schedule, sequence_parallel: bool, reader: Schedule | None = None, argument: str | None = None
) -> None:
    """The input of a parallel region: whole in the forward pass, its gradient summed in the backward pass.

    ``reader``: the one linear that reads the input, if there is one; it overlaps the sum with its weight gradient.
    ``argument``: the input's name, where the region has others that are not replicated.
    """
    if sequence_parallel:
        region.sync("fwd_pre", "all_gather", axis=SEQUENCE, argument=argument)
    elif reader is not None:
        reader.sync("bwd_post", "all_reduce")
    else:
        region.sync("bwd_post", "all_reduce", argument=argument)


def split_vocabulary(
    model: Schedule, embeddings: str | tuple[str, ...], head: str, labels: Labels | None = "next"
) -> None:
    """Split embeddings, head and loss over the vocabulary, padded where it does not divide; tied or not.

    ``labels`` are those of ``shard_loss``; None for a model whose own loss needs the logits whole.
    """
    split_embeddings(model, embeddings)
    for name, _ in model[head].module.named_parameters():
        if not model[head].is_sharded(name):
            model[head].shard(name, axis=0, pad=True)
    model[head].sync("bwd_post", "all_reduce")
    if labels is None:
        model[head].sync("fwd_post", "all_gather", axis=-1)
    else:
        model.shard_loss(head, labels)


def split_embeddings(model: Schedule, paths: str | tuple[str, ...]) -> None:
    """Split embeddings, which may share a weight or be one module, over the vocabulary."""
    nodes = [model[path] for path in ((paths,) if isinstance(paths, str) else paths)]
    weights = {id(node.module.weight): node for node in reversed(nodes)}
    modules = {id(node.module): node for node in reversed(nodes)}
    for node in reversed(weights.values()):
        node.shard("weight", axis=0, pad=True)
    for node in reversed(modules.values()):
        node.sync("fwd_post", "all_reduce")


def split_sequence(first_block: Schedule, norms: Iterable[Schedule], last: Schedule) -> None:
    """Run norms on slices of the sequence, from the first block's input to the output of the ``last`` norm or block."""
    first_block.sync("fwd_pre", "scatter", axis=SEQUENCE)
    for norm in (*norms, last):
        for name, _ in norm.module.named_parameters(recurse=False):
            norm.annotate(name, "partial_gradient", True)
    last.sync("fwd_post", "all_gather", axis=SEQUENCE)
