"""``shard_loss``: the loss of a language model on vocabulary shards of the logits."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import Problem, did_you_mean
from ..execution import Forward, argument_names, change_plan, original_class, plan_of
from ..execution import Sync as PlannedSync
from ..layout import Layout
from ..loss import VocabularyParallelLoss, is_loss_following, loss_follows
from ..mesh import Mesh
from ..primitive import Primitive, Site
from ..roles import output_of
from .sync import gather_columns

Labels = Literal["next", "same"]


@dataclass(frozen=True)
class ShardLoss(Primitive):
    """Compute the model's loss on the columns of the vocabulary that each rank's ``head`` holds.

    ::

        logits (B, S, V) on every rank, cross-entropy  --shard_loss("lm_head")-->  logits (B, S, V/tp), two small sums

    ``labels``: what the logits of a position are compared with. "next" is the causal language models' token after it,
    for models that ask their ``loss_function``. "same" is the label of the position itself, for models whose forward
    has a mean cross-entropy of its own (masked language models, encoder-decoders).

    Called with ``labels`` while training, the model returns the loss, and None in the place of the logits, which no
    rank holds whole; it keeps no key-value cache unless asked to. Without labels, or in eval mode, the logits are
    whole (gathered, padding dropped), so generation, metrics and losses of the user's own see what the untouched
    model gives.
    """

    verb: ClassVar[str] = "shard_loss"
    head: str
    labels: Labels = "next"

    def check(self, site: Site) -> Iterator[Problem]:
        model = site.module
        paths = dict(model.named_modules())
        yield from self._check_loss(model)
        if self.head not in paths:
            yield Problem(f"it has no module {self.head!r}", did_you_mean(self.head, paths))
            return
        head = paths[self.head]
        weight = head._parameters.get("weight")
        layout = None if weight is None else site.state.layouts.get(site.state.canonical(weight))
        if output_of(head, layout) != "split" or (layout is not None and len(layout.segments) > 1):
            yield Problem(f"the weight of {self.head!r} is not split over the vocabulary", "shard it along its output")
        plan = plan_of(model)
        if holds_sharded_loss(site):
            yield Problem("the loss is sharded already")
        if plan is not None and plan.checkpoint:
            yield Problem("the model is checkpointed as a whole", "checkpoint its blocks")

    def _check_loss(self, model: nn.Module) -> Iterator[Problem]:
        name, choices = original_class(model).__name__, typing.get_args(Labels)
        if self.labels not in choices:
            yield Problem(f"no labels {self.labels!r}", did_you_mean(self.labels, choices))
        elif not hasattr(model, "loss_function") or "labels" not in argument_names(model):
            yield Problem(
                f"{name} has no loss_function that takes labels", "this primitive serves transformers' language models"
            )
        elif self.labels == "next" and not _asks_loss_function(model):
            yield Problem(
                f"the forward of {name} does not ask its loss_function",
                'labels="same" where it has a cross-entropy of its own',
            )
        elif self.labels == "same" and _asks_loss_function(model):
            yield Problem(f"the forward of {name} asks its loss_function, which may shift labels", 'labels="next"')
        elif self.labels == "same" and _lacks_decoder_inputs(model):
            yield Problem(f"{name} has no prepare_decoder_input_ids_from_labels, which its decoder's input needs")

    def apply(self, site: Site) -> None:
        model, mesh = site.module, site.mesh
        head = model.get_submodule(self.head)
        layout = site.state.layouts[site.state.canonical(head._parameters["weight"])]
        start, stop = layout.ranges(mesh.tp_rank)[0]
        loss = VocabularyParallelLoss(start, stop - start, mesh.tp_group)
        if self.labels == "next":
            model.loss_function = loss  # type: ignore[assignment]
        site.state.sharded_losses.append(f"{site.path}.{self.head}".lstrip("."))
        if mesh.tp == 1:
            return
        sharing = _LossSharing(layout, mesh)
        gather = PlannedSync("fwd_post", "all_gather unless the loss follows", sharing.after_head)
        head_plan = plan_of(head)
        change_plan(head, mesh, syncs=(*(head_plan.syncs if head_plan else ()), gather))
        inside = OwnLoss(loss, layout.shape[0]) if self.labels == "same" else None
        change_plan(model, mesh, around=sharing.around_model, inside=inside)


def holds_sharded_loss(site: Site) -> bool:
    return any(step.path == site.path and isinstance(step.primitive, ShardLoss) for step in site.state.history)


def _asks_loss_function(model: nn.Module) -> bool:
    """Also through ``super().forward``."""
    forwards = [inspect.unwrap(cls.__dict__["forward"]) for cls in type(model).__mro__ if "forward" in cls.__dict__]
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return any(code is not None and "loss_function" in code.co_names for code in codes)


def _lacks_decoder_inputs(model: nn.Module) -> bool:
    needs = "decoder_input_ids" in argument_names(model)
    return needs and not hasattr(model, "prepare_decoder_input_ids_from_labels")


@dataclass(frozen=True)
class OwnLoss:
    """Computes the loss in the place of a forward that has a cross-entropy of its own: that sees no labels."""

    loss: VocabularyParallelLoss
    vocabulary: int

    def __call__(self, model: Any, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        labels = _labels_of(model, args, kwargs)
        if labels is None:
            return forward(*args, **kwargs)
        names = argument_names(model)
        given = {**dict(zip(names, args, strict=False)), **kwargs, "labels": None}
        has_decoder_input = any(given.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if "decoder_input_ids" in names and not has_decoder_input:
            given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        # what does not fit is refused by the forward itself
        output = forward(*args[len(names) :], **given)
        if isinstance(output, tuple):
            return (self._loss(output[0], labels), *output)
        rest = {name: value for name, value in output.items() if name != "loss"}
        # Made anew: an entry that is added comes last, and many read the loss as the first.
        return type(output)(loss=self._loss(output.logits, labels), **rest)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(logits, labels, self.vocabulary, shift_labels=labels)
        # As torch's cross-entropy has it: the dtype of the logits, float32 under autocast.
        is_autocast = not logits.is_meta and torch.is_autocast_enabled(logits.device.type)
        return loss if is_autocast else loss.to(logits.dtype)


@dataclass
class _LossSharing:
    """Keeps the head's output split on its way to the loss, and whole on every other way."""

    layout: Layout
    mesh: Mesh

    def after_head(self, logits: Tensor) -> Tensor:
        return logits if is_loss_following() else gather_columns(logits, self.layout, self.mesh)

    def around_model(self, model: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _labels_of(model, args, kwargs) is None:
            return forward(*args, **kwargs)
        if model.training and "use_cache" in argument_names(model):
            kwargs.setdefault("use_cache", False)
        with loss_follows():
            output = forward(*args, **kwargs)
        return self._with_whole_logits(output, model.training)

    def _with_whole_logits(self, output: Any, training: bool) -> Any:
        if isinstance(output, tuple):
            loss, logits, *rest = output
            return (loss, self._whole(logits, training), *rest)
        # Made anew: what is set to None as an attribute stays under its key.
        entries = {name: value for name, value in output.items() if name != "logits"}
        return type(output)(**entries, logits=self._whole(output.logits, training))

    def _whole(self, logits: Tensor, training: bool) -> Tensor | None:
        return None if training else gather_columns(logits, self.layout, self.mesh)


def _labels_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = argument_names(model).index("labels")
    return kwargs.get("labels", args[position] if position < len(args) else None)
