"""``shard_loss``: the causal-LM loss on vocabulary shards of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import Problem, did_you_mean
from ..execution import Forward, argument_names, change_plan, plan_of
from ..execution import Sync as PlannedSync
from ..layout import Layout
from ..loss import VocabularyParallelLoss
from ..mesh import Mesh
from ..primitive import Primitive, Site
from ..roles import output_of
from .sync import gather_columns


@dataclass(frozen=True)
class ShardLoss(Primitive):
    """Compute the model's causal-LM loss on the columns of the vocabulary that each rank's ``head`` holds.

    ::

        logits (B, S, V) on every rank, cross-entropy  --shard_loss("lm_head")-->  logits (B, S, V/tp), two small sums

    Called with ``labels`` while training, the model returns the loss, and None in the place of the logits, which no
    rank holds whole; it keeps no key-value cache unless asked to. Without labels, or in eval mode, the logits are
    whole (gathered, padding dropped), so generation, metrics and losses of the user's own see what the untouched
    model gives.
    """

    verb: ClassVar[str] = "shard_loss"
    head: str

    def check(self, site: Site) -> Iterator[Problem]:
        model = site.module
        paths = dict(model.named_modules())
        if not hasattr(model, "loss_function") or "labels" not in argument_names(model):
            yield Problem(
                f"{type(model).__name__} has no loss_function that takes labels",
                "this primitive serves transformers' causal language models",
            )
        if self.head not in paths:
            yield Problem(f"it has no module {self.head!r}", did_you_mean(self.head, paths))
            return
        head = paths[self.head]
        weight = head._parameters.get("weight")
        layout = None if weight is None else site.state.layouts.get(site.state.canonical(weight))
        if output_of(head, layout) != "split" or (layout is not None and len(layout.segments) > 1):
            yield Problem(f"the weight of {self.head!r} is not split over the vocabulary", "shard it along its output")
        plan = plan_of(model)
        if isinstance(getattr(model, "loss_function", None), VocabularyParallelLoss):
            yield Problem("the loss is sharded already")
        if plan is not None and plan.checkpoint:
            yield Problem("the model is checkpointed as a whole", "checkpoint its blocks")

    def apply(self, site: Site) -> None:
        model, mesh = site.module, site.mesh
        head = model.get_submodule(self.head)
        layout = site.state.layouts[site.state.canonical(head._parameters["weight"])]
        start, stop = layout.ranges(mesh.tp_rank)[0]
        model.loss_function = VocabularyParallelLoss(start, stop - start, mesh.tp_group)  # type: ignore[assignment]
        site.state.sharded_losses.append(f"{site.path}.{self.head}".lstrip("."))
        if mesh.tp == 1:
            return
        sharing = _LossSharing(layout, mesh)
        gather = PlannedSync("fwd_post", "all_gather unless the loss follows", sharing.after_head)
        head_plan = plan_of(head)
        change_plan(head, mesh, syncs=(*(head_plan.syncs if head_plan else ()), gather))
        change_plan(model, mesh, around=sharing.around_model)


@dataclass
class _LossSharing:
    """Keeps the head's output split on its way to the loss, and whole on every other way."""

    layout: Layout
    mesh: Mesh
    loss_follows: bool = False

    def after_head(self, logits: Tensor) -> Tensor:
        return logits if self.loss_follows else gather_columns(logits, self.layout, self.mesh)

    def around_model(self, model: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = argument_names(model).index("labels")
        labels = kwargs.get("labels", args[position] if position < len(args) else None)
        if labels is None:
            return forward(*args, **kwargs)
        if model.training and "use_cache" in argument_names(model):
            kwargs.setdefault("use_cache", False)
        self.loss_follows = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.loss_follows = False
        return self._with_whole_logits(output, model.training)

    def _with_whole_logits(self, output: Any, training: bool) -> Any:
        if isinstance(output, tuple):
            loss, logits, *rest = output
            return (loss, self._whole(logits, training), *rest)
        output.logits = self._whole(output.logits, training)
        return output

    def _whole(self, logits: Tensor, training: bool) -> Tensor | None:
        return None if training else gather_columns(logits, self.layout, self.mesh)
