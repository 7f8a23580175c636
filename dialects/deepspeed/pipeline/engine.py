"""DeepSpeed's PipelineEngine with our wires: what crosses is known to both sides, so no metadata does."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine, PipelineError
from torch import Tensor

from partbook.core import Mesh

from .feed import Feed

# What every backend sends as it is; anything else that takes no gradient goes as bytes.
_SENT_AS_THEY_ARE = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)


def attach(engine: PipelineEngine, feed: Feed) -> None:
    """Give ``engine`` the feed's micro-batches and the wires between its stages."""
    engine.module.__dict__["optimizer"] = engine.optimizer
    wires = _Wires(engine, feed)
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **wires.instructions()}
    engine.train_batch = functools.partial(_train_batch, engine, feed, wires)
    engine.eval_batch = functools.partial(_eval_batch, engine, feed, wires)
    for name in ("forward", "backward", "step"):
        setattr(engine, name, functools.partial(_refuse, name))


def _train_batch(engine: PipelineEngine, feed: Feed, wires: _Wires, data_iter: Iterator[Any] | None = None) -> Tensor:
    """``PipelineEngine.train_batch``: its micro-batches are collected, and agreed on, before the first one runs."""
    if not torch.is_grad_enabled():
        raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
    iterator = data_iter if data_iter is not None else engine.data_iterator
    _load(engine, feed, iterator, engine.micro_batches, training=True)
    loss = PipelineEngine.train_batch(engine)
    wires.finish()
    return loss


def _eval_batch(
    engine: PipelineEngine, feed: Feed, wires: _Wires, data_iter: Iterator[Any], return_logits: bool = False,
    compute_loss: bool = True, reduce_output: str | None = "avg", bcast_loss: bool = True,
    num_micro_batches: int | None = None,
) -> Any:  # fmt: skip
    """``PipelineEngine.eval_batch``, for batches of any sizes. Logits are those of the last stage's own rank."""
    count = num_micro_batches or engine.micro_batches
    _load(engine, feed, data_iter, count, training=False)
    feed.computes_loss, feed.outputs = compute_loss, []
    # What one evaluation leaves here the next one would add to.
    engine.total_loss = None
    reduce = reduce_output if compute_loss else None
    found = PipelineEngine.eval_batch(engine, data_iter, return_logits, compute_loss, reduce, bcast_loss, count)
    wires.finish()
    if compute_loss:
        return found
    outputs, feed.outputs = feed.outputs, []
    result = engine._reduce_outputs(outputs, reduce=reduce_output, micro_batches=count) if outputs else None
    return (result, outputs[-1] if outputs else None) if return_logits else result


def _load(engine: PipelineEngine, feed: Feed, iterator: Any, count: int, *, training: bool) -> None:
    dtype = next((p.dtype for p in engine.module.parameters()), torch.float32)
    if iterator is not None and not hasattr(iterator, "__next__"):
        raise TypeError(
            f"data_iter is a {type(iterator).__name__}, no iterator: each step would take its first batches again\n"
            "  hint: data_iter=iter(deepspeed.utils.RepeatingLoader(loader)), made once"
        )
    prepare = engine.batch_fn or (lambda item: item)
    device = torch.device(engine.device)
    feed.load(iterator, count, training=training, prepare=prepare, device=device, dtype=dtype)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    call = "engine(...)" if name == "forward" else f"engine.{name}()"
    raise PipelineError(
        f"{call} cannot run a model that is cut into pipeline stages: its micro-batches are interleaved\n"
        "  hint: loss = engine.train_batch(data_iter=iterator) takes gradient_accumulation_steps batches from the "
        "iterator and makes one optimizer step; engine.eval_batch(data_iter=iterator) evaluates"
    )


class _Wires:
    """Sends and receives of one rank. Sends do not wait for the receiver; what comes next is received ahead.

    Activations and gradients have a group each: where a backend runs the transfers between two ranks in the order in
    which each of them asked for them, those of one direction never wait for the other.
    """

    def __init__(self, engine: PipelineEngine, feed: Feed) -> None:
        self.engine, self.feed, self.stage = engine, feed, feed.stage
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._started = 0
        self._activations, self._gradients = (_pipeline_group(feed.mesh) for _ in range(2))
        self._from_before = _Inbox(self, self._activations, self.stage - 1, self._expected_activations)
        self._from_behind = _Inbox(self, self._gradients, self.stage + 1, self._expected_gradients)

    def instructions(self) -> dict[Any, Callable[..., None]]:
        own = {
            schedule.LoadMicroBatch: self._load_micro_batch,
            schedule.RecvActivation: self._receive_activations,
            schedule.ForwardPass: self._forward,
            schedule.SendActivation: self._nothing,
            schedule.RecvGrad: self._receive_gradients,
            schedule.SendGrad: self._send_gradients,
        }
        return {instruction: _without_engine(method) for instruction, method in own.items()}

    def finish(self) -> None:
        """The end of a step: everything has been sent, nothing is kept."""
        while self._pending:
            self._pending.popleft()[0].wait()
        self._started = 0
        self.feed.batches = []

    # ------------------------------------------------------------------ instructions

    def _load_micro_batch(self, buffer_id: int) -> None:
        if self.stage == 0:
            self._begin(buffer_id)

    def _begin(self, buffer_id: int) -> int:
        number = self._started
        self._started += 1
        # On the CPU: its value is read without waiting for a device.
        self.engine.pipe_buffers["inputs"][buffer_id] = torch.tensor(number)
        self.engine.pipe_buffers["labels"][buffer_id] = None
        return number

    def _number(self, buffer_id: int) -> int:
        return int(self.engine.pipe_buffers["inputs"][buffer_id])

    def _receive_activations(self, buffer_id: int) -> None:
        number = self._begin(buffer_id)
        batch, tensors = self.feed.batches[number], self._from_before.take(number)
        values = batch.part(self.stage).received
        batch.values |= dict(zip(batch.carried[self.stage - 1], tensors[len(values) :], strict=True))
        for value, tensor in zip(values, tensors, strict=False):
            batch.received.append(tensor.requires_grad_(value.requires_grad and torch.is_grad_enabled()))

    def _forward(self, buffer_id: int) -> None:
        PipelineEngine._exec_forward_pass(self.engine, buffer_id)
        batch = self.feed.batches[self._number(buffer_id)]
        sent, batch.sent = batch.sent, []
        values = batch.part(self.stage).sent
        for i, tensor in enumerate(sent):
            has_gradient = i < len(values) and values[i].requires_grad
            self._send(tensor.detach(), has_gradient, self.stage + 1, self._activations)
        if not torch.is_grad_enabled():
            # No backward lets go of them.
            batch.received, batch.values = [], {}

    def _nothing(self, buffer_id: int) -> None:
        """Activations are sent as soon as they are there, not when the gradients of an earlier batch have come."""

    def _receive_gradients(self, buffer_id: int) -> None:
        number = self._number(buffer_id)
        self.feed.batches[number].gradients = self._from_behind.take(number)
        # for the one tensor that stands for all that were sent
        self.engine.grad_layer = torch.ones_like(self.engine.pipe_buffers["outputs"][buffer_id])

    def _send_gradients(self, buffer_id: int) -> None:
        batch = self.feed.batches[self._number(buffer_id)]
        for tensor in batch.received:
            if tensor.requires_grad:
                # What a stage receives and has no gradient for has one of zeros: the sender waits for it.
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self._send(gradient, True, self.stage - 1, self._gradients)
        batch.received = []
        self.engine.pipe_buffers["inputs"][buffer_id] = None

    # ------------------------------------------------------------------ what goes over the wires

    def _expected_activations(self, number: int) -> list[_Expected]:
        batch = self.feed.batches[number]
        found = [_Expected(batch.instance.shape(v), v.dtype, v.requires_grad) for v in batch.part(self.stage).received]
        raw = (batch.looks[name] for name in batch.carried[self.stage - 1])
        return found + [_Expected(tuple(look.shape), look.dtype, False) for look in raw]

    def _expected_gradients(self, number: int) -> list[_Expected]:
        batch = self.feed.batches[number]
        sent = (value for value in batch.part(self.stage).sent if value.requires_grad)
        return [_Expected(batch.instance.shape(value), value.dtype, True) for value in sent]

    def _send(self, tensor: Tensor, has_gradient: bool, stage: int, group: Any) -> None:
        tensor = tensor.contiguous()
        if not has_gradient and tensor.dtype not in _SENT_AS_THEY_ARE:
            tensor = tensor.reshape(-1).view(torch.uint8)
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()
        self._pending.append((dist.isend(tensor, group=group, group_dst=stage), tensor))


class _Expected(NamedTuple):
    """A tensor that will come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


class _Inbox:
    """Receives from one neighbour, micro-batch by micro-batch, one ahead of what is taken."""

    def __init__(self, wires: _Wires, group: Any, source: int, expected: Callable[[int], list[_Expected]]) -> None:
        self._wires, self._group, self._source, self._expected = wires, group, source, expected
        self._posted: dict[int, list[tuple[Any, Tensor]]] = {}

    def take(self, number: int) -> list[Tensor]:
        if number not in self._posted:
            self._post(number)
        arriving = self._posted.pop(number)
        for work, _ in arriving:
            work.wait()
        if number + 1 < len(self._wires.feed.batches):
            self._post(number + 1)
        return [tensor for _, tensor in arriving]

    def _post(self, number: int) -> None:
        self._posted[number] = [self._receive(expected) for expected in self._expected(number)]

    def _receive(self, expected: _Expected) -> tuple[Any, Tensor]:
        tensor = torch.empty(expected.shape, dtype=expected.dtype, device=self._wires.engine.device)
        is_bytes = not expected.has_gradient and expected.dtype not in _SENT_AS_THEY_ARE
        buffer = tensor.view(-1).view(torch.uint8) if is_bytes else tensor
        return dist.irecv(buffer, group=self._group, group_src=self._source), tensor


def _without_engine(method: Callable[[int], None]) -> Callable[..., None]:
    """DeepSpeed binds an instruction's function to the engine."""
    return lambda _engine, buffer_id: method(buffer_id)


def _pipeline_group(mesh: Mesh) -> Any:
    """A new group of the ranks of this pipeline. Collective: every rank of the world calls it."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in mesh.rank_groups("pp")]
    return next(group for ranks, group in groups if mesh.rank in ranks)
