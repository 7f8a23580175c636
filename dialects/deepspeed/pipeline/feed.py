"""The micro-batches of one step: collected before it starts, agreed on by all ranks of a pipeline, run by the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partbook.core import AgreementError, PartbookError, ScheduledModel
from partbook.core.execution import argument_names
from partbook.core.pipeline import Instance, Part, refuse_unknown
from partbook.core.tracing.examples import TensorLike, shapes_of

from ...batches import digest

# loss_fn(the model's output, labels) -> a scalar
LossFunction = Callable[[Any, Any], Tensor]


class EndOfData(PartbookError, StopIteration):
    """The iterator ended before a whole step's micro-batches were there: on every rank at once, and none was used."""


@dataclass
class MicroBatch:
    """One micro-batch on one rank. ``looks`` are the model's inputs as every rank knows them, ``values`` those that
    this rank has, ``carried`` what each boundary carries of them for ranks without an iterator."""

    instance: Instance
    looks: Mapping[str, Tensor]
    values: dict[str, Tensor]
    carried: tuple[tuple[str, ...], ...]
    labels: Any = None
    received: list[Tensor] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def part(self, stage: int) -> Part:
        return self.instance.wiring.parts[stage]


class Feed:
    """What the stage of this rank works on."""

    def __init__(self, scheduled: ScheduledModel, loss_fn: LossFunction | None) -> None:
        assert scheduled.pipeline is not None
        self.scheduled, self.pipeline = scheduled, scheduled.pipeline
        self.mesh, self.stage = scheduled.mesh, scheduled.mesh.pp_rank
        self.loss_fn = loss_fn
        self.batches: list[MicroBatch] = []
        # of an evaluation without a loss, by micro-batch
        self.outputs: list[Tensor] = []
        self._loss: Any = None
        self.computes_loss = True
        self._is_checked: set[bool] = set()

    @property
    def is_last(self) -> bool:
        return self.stage == self.mesh.pp - 1

    # ------------------------------------------------------------------ before a step

    def load(
        self, iterator: Iterator[Any] | None, count: int, *, training: bool, prepare: Callable[[Any], Any],
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Take ``count`` items of ``iterator`` and agree on them with the other ranks of the pipeline.

        An item is a dict of the model's arguments, or a pair (inputs, labels) as DeepSpeed has it, where inputs are a
        dict, a tensor or a tuple of tensors. Raises EndOfData, on every rank, when one iterator ends before; and
        AgreementError when the ranks' batches are not the same.
        """
        items = None if iterator is None else [prepare(item) for _, item in zip(range(count), iterator, strict=False)]
        mine = None if items is None else [self._named(item, device, dtype) for item in items]
        everyone = self._exchange(mine, training)
        known = _agree(everyone, count, self.mesh.tp)
        has_data = [everyone[stage * self.mesh.tp] is not None for stage in range(self.mesh.pp)]
        self.batches = []
        for number, looks in enumerate(known.looks):
            inputs, labels = mine[number] if mine is not None else (None, None)
            self.batches.append(self._micro_batch(looks, inputs, labels, has_data, training))

    def _exchange(self, mine: list[Any] | None, training: bool) -> list[_Offer | None]:
        offer = None
        if mine is not None:
            is_first = training not in self._is_checked
            content = [digest((), inputs) for inputs, _ in mine[:1]] if is_first else []
            offer = _Offer([shapes_of(inputs) or {} for inputs, _ in mine], content)
        self._is_checked.add(training)
        everyone: list[_Offer | None] = [None] * (self.mesh.pp * self.mesh.tp)
        dist.all_gather_object(everyone, offer, group=self.mesh.model_group)
        return everyone

    def _named(self, item: Any, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], Any]:
        """(the model's arguments by name, labels for the user's loss function)."""
        inputs, labels = item, None
        if not isinstance(item, Mapping):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise ValueError(
                    f"a batch is a {type(item).__name__}, no dict of the model's arguments and no pair (inputs, labels)"
                )
            inputs, labels = item
        named = dict(inputs) if isinstance(inputs, Mapping) else self._by_position(inputs)
        if self.loss_fn is not None and labels is None:
            labels = named.pop("labels", None)
        elif self.loss_fn is None and labels is not None:
            named["labels"] = labels
        refuse_unknown(self.scheduled.original.skeleton, named)
        moved = {name: _moved(name, value, device, dtype) for name, value in named.items() if value is not None}
        return moved, tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, labels)

    def _by_position(self, inputs: Any) -> dict[str, Any]:
        values = inputs if isinstance(inputs, tuple | list) else (inputs,)
        return dict(zip(argument_names(self.scheduled.original.skeleton), values, strict=False))

    def _micro_batch(
        self, looks: Mapping[str, Any], inputs: Mapping[str, Any] | None, labels: Any, has_data: list[bool],
        training: bool,
    ) -> MicroBatch:  # fmt: skip
        with torch.set_grad_enabled(training):
            wiring = self.pipeline.wiring(looks, training)
            skeleton = self.pipeline.skeleton
            known = wiring.values(skeleton, {name: _on_meta(look) for name, look in looks.items()})
            values = {} if inputs is None else wiring.values(skeleton, inputs)
        carried = _carried([part.raw for part in wiring.parts], has_data)
        if not has_data[0] and wiring.parts[0].raw:
            raise AgreementError("the first stage got no iterator: pass data_iter on its ranks at least")
        return MicroBatch(wiring.at(known), known, values, carried, labels)

    # ------------------------------------------------------------------ in a step

    def run(self, number: int, module: nn.Module) -> Any:
        """The stage's forward for micro-batch ``number``: DeepSpeed gets one tensor to call ``backward`` on."""
        batch = self.batches[number]
        device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        result = batch.instance.run(self.stage, module, batch.received, batch.values, device)
        if self.is_last:
            return self._finish(result, batch)
        batch.sent = [*result, *(batch.values[name] for name in batch.carried[self.stage])]
        differentiable = [
            t for t, value in zip(result, batch.part(self.stage).sent, strict=True) if value.requires_grad
        ]
        return _Joined.apply(batch, *differentiable)

    def _finish(self, result: Any, batch: MicroBatch) -> Any:
        if torch.is_grad_enabled():
            self._loss = self._loss_from(result, batch)
            return self._loss
        self._loss = self._loss_from(result, batch) if self.computes_loss else None
        logits = result.get("logits") if isinstance(result, Mapping) else None
        if logits is None:
            logits = next(t for t in tree_leaves(result) if isinstance(t, Tensor))
        if self.computes_loss:
            return logits
        # DeepSpeed would add up what is no loss, and batches differ in size.
        self.outputs.append(logits)
        return logits.new_zeros(())

    def _loss_from(self, result: Any, batch: MicroBatch) -> Tensor:
        loss: Any
        if self.loss_fn is not None:
            loss = self.loss_fn(result, batch.labels)
        else:
            loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"a {type(loss).__name__}" + (f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else "")
            raise ValueError(
                f"the model's output has no loss but {what}\n"
                "  hint: labels in the batch for a transformers model, else initialize(loss_fn=...)"
            )
        return loss

    def loss_of(self, _outputs: Any, _labels: Any) -> Any:
        """DeepSpeed's loss_fn: the loss was computed with the last stage."""
        return self._loss


class _Joined(torch.autograd.Function):
    """The sent tensors as one: its backward gives each of them the gradient that was received for it.

    DeepSpeed would run one backward for each tensor, through what they share again and again.
    """

    @staticmethod
    def forward(ctx: Any, batch: MicroBatch, *tensors: Tensor) -> Tensor:
        ctx.batch = batch
        return torch.zeros((), device=tensors[0].device if tensors else None)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.batch.gradients = ctx.batch.gradients, []
        return None, *gradients


@dataclass(frozen=True)
class _Offer:
    """What a rank's iterator gave: the looks of its items, and the content of the first one where that is compared."""

    looks: list[dict[str, Any]]
    content: list[dict[str, str]]


def _agree(everyone: list[_Offer | None], count: int, tp: int) -> _Offer:
    offers = {rank: offer for rank, offer in enumerate(everyone) if offer is not None}
    if not offers:
        raise ValueError("train_batch and eval_batch need a data_iter: no rank of the pipeline has one")
    got = {rank: len(offer.looks) for rank, offer in offers.items()}
    if min(got.values()) < count:
        raise EndOfData(
            f"the iterator ended after {min(got.values())} of the {count} micro-batches of a step, which were not used"
            "\n  hint: deepspeed.utils.RepeatingLoader starts it again"
        )
    for stage_ranks in (range(start, start + tp) for start in range(0, len(everyone), tp)):
        if len({rank in offers for rank in stage_ranks}) > 1:
            raise AgreementError("some ranks of a tp group have an iterator and some have none: pass it on all of them")
    (first_rank, first), *others = offers.items()
    for rank, offer in others:
        for number, (here, there) in enumerate(zip(first.looks, offer.looks, strict=True)):
            if here != there:
                raise AgreementError(_difference(f"micro-batch {number}", first_rank, here, rank, there))
        for here, there in zip(first.content, offer.content, strict=True):
            if here != there:
                raise AgreementError(_difference("micro-batch 0", first_rank, here, rank, there))
    return first


def _difference(what: str, first: int, here: Mapping[str, Any], other: int, there: Mapping[str, Any]) -> str:
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    seen = f"{here.get(names[0], 'nothing')} and {there.get(names[0], 'nothing')}"
    return (
        f"the ranks of one pipeline must see the same batches, but {names[0]!r} of {what} differs between its ranks "
        f"{first} and {other}: {seen}\n"
        "  hint: split the data over the data-parallel ranks only, and seed its order equally in a pipeline"
    )


def _carried(raw: list[tuple[str, ...]], has_data: list[bool]) -> tuple[tuple[str, ...], ...]:
    """For each boundary the raw inputs that the ranks behind it need and have no iterator for."""
    found = []
    for boundary in range(len(raw) - 1):
        needed: dict[str, None] = {}
        for stage in range(boundary + 1, len(raw)):
            if has_data[stage]:
                break
            needed |= dict.fromkeys(raw[stage])
        found.append(tuple(needed))
    return tuple(found)


def _moved(name: str, value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name!r} in a batch is a {type(value).__name__}, not a tensor or a number")


def _on_meta(look: Any) -> Any:
    return look.make(torch.device("meta")) if isinstance(look, TensorLike) else look
