"""The micro-batches of one step: collected before it starts, agreed on by all ranks of a pipeline, run by the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partbook.core import AgreementError, Mesh, PartbookError, ScheduledModel, rng
from partbook.core.execution import argument_names
from partbook.core.pipeline import Instance, Part, refuse_unknown
from partbook.core.tracing.examples import TensorLike, shapes_of

from ...batches import digest
from ...micro_batches import LossFunction, arguments_of, loss_of, on_device, refuse_differences


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
        dict, a tensor or a tuple of tensors. Raises EndOfData, on every rank of the world, when one iterator ends
        before; and AgreementError when the batches of a pipeline's ranks are not the same.
        """
        items = None if iterator is None else [prepare(item) for _, item in zip(range(count), iterator, strict=False)]
        named = None if items is None else [self._named(item) for item in items]
        everyone = self._exchange(named, training, dtype)
        self._refuse_end(everyone, count)
        known = _agree(everyone, self.mesh)
        self._is_checked.add(training)
        mine = None if named is None else [_on_device(inputs, labels, device, dtype) for inputs, labels in named]
        has_data = [everyone[stage * self.mesh.tp] is not None for stage in range(self.mesh.pp)]
        self.batches = []
        for number, looks in enumerate(known.looks):
            inputs, labels = mine[number] if mine is not None else (None, None)
            self.batches.append(self._micro_batch(looks, inputs, labels, has_data, training))

    def _exchange(self, mine: list[Any] | None, training: bool, dtype: torch.dtype) -> list[_Offer | None]:
        offer = None
        if mine is not None:
            is_first = training not in self._is_checked
            content = [_sums(inputs) for inputs, _ in mine]
            if is_first and mine:
                content[0] = digest((), mine[0][0])
            offer = _Offer([_looks(inputs, dtype) for inputs, _ in mine], content)
        everyone: list[_Offer | None] = [None] * (self.mesh.pp * self.mesh.tp)
        dist.all_gather_object(everyone, offer, group=self.mesh.model_group)
        return everyone

    def _refuse_end(self, everyone: list[_Offer | None], count: int) -> None:
        got = min((len(offer.looks) for offer in everyone if offer is not None), default=count)
        if self.mesh.dp > 1:
            # The others of the dp group would wait for this pipeline's gradients.
            device = next((p.device for p in self.scheduled.model.parameters()), torch.device("cpu"))
            fewest = torch.tensor(got, device=device)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.mesh.dp_group)
            got = int(fewest)
        if got < count:
            raise EndOfData(
                f"the iterator ended after {got} of the {count} micro-batches of a step, which were not used"
                "\n  hint: deepspeed.utils.RepeatingLoader starts it again"
            )

    def _named(self, item: Any) -> tuple[dict[str, Any], Any]:
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
        return arguments_of(named), labels

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
        place = self.stage * self.mesh.dp + self.mesh.dp_rank
        with rng.of_stage(place) if torch.is_grad_enabled() else nullcontext():
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
            self._loss = loss_of(result, batch.labels, self.loss_fn)
            return self._loss
        self._loss = loss_of(result, batch.labels, self.loss_fn) if self.computes_loss else None
        logits = result.get("logits") if isinstance(result, Mapping) else None
        if logits is None:
            logits = next(t for t in tree_leaves(result) if isinstance(t, Tensor))
        if self.computes_loss:
            return logits
        # DeepSpeed would add up what is no loss, and batches differ in size.
        self.outputs.append(logits)
        return logits.new_zeros(())

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
    """What a rank's iterator gave: the looks of its items, and of their content what is compared."""

    looks: list[dict[str, Any]]
    content: list[dict[str, str]]


def _agree(everyone: list[_Offer | None], mesh: Mesh) -> _Offer:
    offers = {rank: offer for rank, offer in enumerate(everyone) if offer is not None}
    if not offers:
        raise ValueError("train_batch and eval_batch need a data_iter: no rank of the pipeline has one")
    for stage_ranks in (range(start, start + mesh.tp) for start in range(0, len(everyone), mesh.tp)):
        if len({rank in offers for rank in stage_ranks}) > 1:
            raise AgreementError("some ranks of a tp group have an iterator and some have none: pass it on all of them")
    first = next(iter(offers.values()))
    for number in range(len(first.looks)):
        refuse_differences([None if offer is None else offer.looks[number] for offer in everyone], mesh, number)
        refuse_differences([None if offer is None else offer.content[number] for offer in everyone], mesh, number)
    return first


def _looks(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """As the model will get them."""
    looks = shapes_of(inputs) or {}
    is_float = {name for name, look in looks.items() if isinstance(look, TensorLike) and look.dtype.is_floating_point}
    return {name: replace(look, dtype=dtype) if name in is_float else look for name, look in looks.items()}


def _sums(inputs: Mapping[str, Any]) -> dict[str, str]:
    """What tells most batches apart, of what can be read without waiting for a device."""
    return {
        name: f"a sum of {int(value.sum())}"
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_floating_point()
    }


def _on_device(
    inputs: Mapping[str, Any], labels: Any, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Any], Any]:
    moved = {name: on_device(name, value, device, dtype) for name, value in inputs.items()}
    return moved, tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, labels)


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


def _on_meta(look: Any) -> Any:
    return look.make(torch.device("meta")) if isinstance(look, TensorLike) else look
