"""Causal-LM cross-entropy on vocabulary shards of the logits, without gathering them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .collectives import max_over, sum_over


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss as in Megatron-LM (arXiv:1909.08053, section 3): two small all-reduces, none of logits.

    Saves the logits in their own dtype and the log-normaliser instead of a float32 softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, start: int, group: ProcessGroup | None) -> Tensor:
        wide_NV = _at_least_float32(logits_NV)
        peak_N = wide_NV.amax(dim=-1)
        if group is not None:
            peak_N = max_over(peak_N, group)
        local_N = targets_N - start
        elsewhere_N = (local_N < 0) | (local_N >= wide_NV.shape[-1])
        local_N = local_N.masked_fill(elsewhere_N, 0)
        target_N = wide_NV.gather(1, local_N[:, None])[:, 0] - peak_N
        target_N = target_N.masked_fill(elsewhere_N, 0)
        sums_2N = torch.stack([(wide_NV - peak_N[:, None]).exp_().sum(dim=-1), target_N])
        if group is not None:
            sums_2N = sum_over(sums_2N, group)
        log_sum_N = sums_2N[0].log()
        ctx.save_for_backward(logits_NV, peak_N + log_sum_N, local_N, elsewhere_N)
        return log_sum_N - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, log_normaliser_N, local_N, elsewhere_N = ctx.saved_tensors
        grad_NV = (_at_least_float32(logits_NV) - log_normaliser_N[:, None]).exp_()
        minus_one_N = elsewhere_N.to(grad_NV.dtype) - 1
        grad_NV.scatter_add_(1, local_N[:, None], minus_one_N[:, None])
        return grad_NV.mul_(grad_N[:, None]).to(logits_NV.dtype), None, None, None


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, start: int = 0, size: int | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """Per-token cross-entropy, float32 (float64 for float64 logits).

    logits (N, V/tp), this rank's columns [start, start + V/tp) of the padded vocabulary; targets (N) int64, global
    ids, each within the vocabulary -> loss (N). ``size`` is how many of the columns are real: padded ones are left
    out, so they win nothing of the softmax. Collective over ``group``.
    """
    if size is not None and size < logits.shape[-1]:
        logits = logits[:, :size]
    if logits.shape[-1] == 0:
        # A rank that holds nothing but padding still takes part in the collectives.
        logits = torch.cat([logits, logits.new_full((logits.shape[0], 1), torch.finfo(logits.dtype).min)], dim=-1)
    return _VocabularyParallelCrossEntropy.apply(logits, targets, start, group)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    start: int = 0,
    size: int | None = None,
    group: ProcessGroup | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss`` on vocabulary shards: the mean over the labels that are not ``ignore_index``.

    logits (..., S, V/tp), labels (..., S) -> scalar. With ``num_items_in_batch``: the sum divided by it.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:]
    targets_N = shift_labels.reshape(-1).to(logits.device)
    counted_N = targets_N != ignore_index
    if vocab_size is not None:
        # A label outside the vocabulary belongs to no rank's columns: without this it would cost nothing.
        inside_N = (targets_N >= 0) & (targets_N < vocab_size) | ~counted_N
        torch._assert_async(inside_N.all(), f"a label lies outside the vocabulary of {vocab_size}")
    losses_N = vocabulary_parallel_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets_N.masked_fill(~counted_N, start),
        start=start,
        size=size,
        group=group,
    )
    total = losses_N.masked_fill(~counted_N, 0).sum()
    return total / (counted_N.sum() if num_items_in_batch is None else num_items_in_batch)


_follows = False


@contextmanager
def loss_follows() -> Iterator[None]:
    """Inside, a model computes its sharded loss: the head's output stays split."""
    global _follows
    before, _follows = _follows, True
    try:
        yield
    finally:
        _follows = before


def is_loss_following() -> bool:
    return _follows


class VocabularyParallelLoss:
    """The ``loss_function`` of a model whose head is split over the vocabulary: this rank's place in it, bound."""

    def __init__(self, start: int, size: int, group: ProcessGroup | None) -> None:
        self.start, self.size, self.group = start, size, group

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return causal_lm_loss(*args, **kwargs, start=self.start, size=self.size, group=self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyParallelLoss:
        # Immutable, and process groups cannot be copied.
        return self
