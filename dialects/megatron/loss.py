"""Per-token losses of the model's logits, as Megatron's schedules and loss functions want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from partbook.core import Layout, Mesh, ScheduledModel
from partbook.core.collectives import gather_parts

_IGNORED = -100


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy of each token by Megatron's own function, over a head that is split as ``layout`` says.

    ``layout`` None: every rank has whole logits.
    """

    config: TransformerConfig
    mesh: Mesh
    layout: Layout | None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [b, s, v/tp], labels [b, s], already shifted -> [b, s]: 0 where the label is -100."""
        counted = labels != _IGNORED
        targets = labels.masked_fill(~counted, 0)
        torch._assert_async(
            ((targets >= 0) & (targets < self._vocabulary(logits))).all(), "a label lies outside the vocabulary"
        )
        return self._losses(logits, targets).masked_fill(~counted, 0)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.layout is None and self.mesh.tp > 1:
            wide = logits.flatten(0, -2).float()
            return functional.cross_entropy(wide, targets.flatten(), reduction="none").view_as(targets)
        logits = self.without_padding(logits)
        if self.config.cross_entropy_loss_fusion:
            return fused_vocab_parallel_cross_entropy(logits, targets, self.mesh.tp_group)
        return tensor_parallel.vocab_parallel_cross_entropy(logits, targets)

    def _vocabulary(self, logits: Tensor) -> int:
        return logits.shape[-1] if self.layout is None else self.layout.shape[0]

    def without_padding(self, logits: Tensor) -> Tensor:
        """Padded columns, which would win a part of the softmax, at the lowest number."""
        if self.layout is None:
            return logits
        start, stop = self.layout.ranges(self.mesh.tp_rank)[0]
        if stop - start == logits.shape[-1]:
            return logits
        column = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(column >= stop - start, torch.finfo(logits.dtype).min)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary on every rank, without padding; no backward."""
        if self.layout is None or self.mesh.tp == 1:
            return logits
        return self.layout.merge(gather_parts(logits.detach(), self.mesh.tp_group), axis=-1)  # type: ignore[arg-type]


def head_layout(scheduled: ScheduledModel, model: nn.Module) -> Layout | None:
    """How the logits of ``model``, this rank's part, are split; None where they are whole, or another stage's."""
    if scheduled.mesh.tp == 1:
        return None
    for step in scheduled.history:
        head = getattr(step.primitive, "head", None)
        if step.primitive.verb != "shard_loss" or head is None:
            continue
        path = f"{step.path}.{head}".lstrip(".")
        module = dict(model.named_modules()).get(path)
        names = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
        return None if module is None else scheduled.layouts.get(names[id(module.get_parameter("weight"))])
    return None
