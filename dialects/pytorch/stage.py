"""One stage under torch.distributed.pipelining: torch's schedules and wires, our micro-batches and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._utils import _derive_grad_metas, _TensorMeta
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from partbook.core import GuardError, Mesh, rng
from partbook.core.pipeline import Instance, Part, share

from .backward import backward_of_inputs, backward_of_parameters

# (the model's output, labels) -> what the last stage gives to torch
Finish = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: its wiring, the model's inputs by their names there, and the labels for a loss function."""

    instance: Instance
    values: Mapping[str, Tensor]
    labels: Any

    def part(self, stage: int) -> Part:
        return self.instance.wiring.parts[stage]


class StageModule(nn.Module):
    """The modules of one stage under their original paths; its forward runs the micro-batch of a number.

    ``place`` tells the random streams of stages and their dp replicas apart.
    """

    def __init__(self, stage: nn.Module, index: int, device: torch.device, place: int) -> None:
        super().__init__()
        share(self, stage)
        self.index, self.device, self.place = index, device, place
        self.batches: Sequence[MicroBatch] = ()
        self.finish: Finish = _as_it_is

    def forward(self, *received: Tensor, number: int) -> Any:
        batch = self.batches[number]
        received = _joined(received)
        with rng.of_stage(self.place) if torch.is_grad_enabled() else nullcontext():
            result = batch.instance.run(self.index, self, received, batch.values, self.device)
        if self.index == len(batch.instance.wiring.parts) - 1:
            return self.finish(result, batch.labels)
        for i, (tensor, value) in enumerate(zip(result, batch.part(self.index).sent, strict=True)):
            if tensor.requires_grad and not value.requires_grad:
                if tensor.grad_fn is None:
                    # transformers' own checkpointing asks for the gradient of a mask, which nobody uses.
                    result[i] = tensor.detach()
                    continue
                raise GuardError(
                    f"{value.name!r}, which stage {self.index} sends, takes a gradient, and took none when the model "
                    "was cut: parameters were frozen then\n  hint: initialize() again after unfreezing them"
                )
        return _joined(result)


class PipelineStage(_PipelineStageBase):
    """torch's stage whose metadata is made of each micro-batch's own shapes, without communication.

    Buffers are made when they are posted and let go when they were used, so a rank holds those of the micro-batches
    that are under way. torch asks for them by its number, in ``args_recv_info`` and ``grad_recv_info`` (2.13).
    """

    submod: StageModule

    def __init__(self, module: StageModule, num_stages: int, mesh: Mesh) -> None:
        super().__init__(module, module.index, num_stages, module.device, mesh.pp_group)
        self.args_recv_info = _Made(lambda chunk: self._buffers(self._looks[chunk].received, module.index - 1))
        self.grad_recv_info = _Made(lambda chunk: self._buffers(self._looks[chunk].sent_gradients, module.index + 1))
        self._looks: list[_Looks] = []
        self._is_met = False

    def load(self, batches: Sequence[MicroBatch], finish: Finish) -> None:
        """Get ready for a step over ``batches``."""
        self.submod.batches, self.submod.finish = batches, finish
        self.chunks = len(batches)
        self._looks = [_Looks.of(batch, self.stage_index) for batch in batches]

    def clear(self) -> None:
        """Keep nothing of a step."""
        self.clear_runtime_states()
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        self.submod.batches = ()

    def _buffers(self, metas: Sequence[_TensorMeta | None], source: int) -> tuple[_RecvInfo, ...]:
        return tuple(
            _RecvInfo(f"{i} of stage {source}", source, self._buffer(meta), meta) for i, meta in enumerate(metas)
        )

    def _buffer(self, meta: _TensorMeta | None) -> Tensor | None:
        return None if meta is None else torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _look_at(self, chunk: int) -> None:
        """Have torch see the shapes of this micro-batch where it expects those of all."""
        looks, meta = self._looks[chunk], self._stage_meta
        meta.inputs, meta.outputs = looks.received, looks.sent
        meta.input_grads, meta.output_grads = looks.received_gradients, looks.sent_gradients
        self.act_send_info = {i: [self.stage_index + 1] for i in range(len(looks.sent))}
        self.grad_send_info = [self.stage_index - 1] * len(looks.received)

    # ------------------------------------------------------------------ torch's stage

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[_RecvInfo, ...]:
        raise AssertionError("buffers for gradients are made for each micro-batch")

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        if self._is_met:
            return []
        self._is_met = True
        # The turning point of a V has its neighbour on its own rank.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._look_at(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, (), {"number": fwd_chunk_id}, save_forward_output)
        self.args_recv_info.pop(fwd_chunk_id, None)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self._look_at(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.grad_recv_info.pop(bwd_chunk_id, None)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            return backward_of_inputs(outputs, gradients, bwd_kwargs["input_values"], self.submod.parameters())
        if backward_type == "weight":
            backward_of_parameters(bwd_kwargs["param_groups"])
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._look_at(fwd_chunk_id)
        # What the last stage gives is torch's to have a loss of.
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._look_at(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # torch's schedules pass gradients on a V's rank in an evaluation too (2.13).
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


@dataclass(frozen=True)
class _Looks:
    """torch's metadata of what crosses a stage's boundaries in one micro-batch; None for what has no gradient."""

    received: tuple[_TensorMeta, ...]
    sent: tuple[_TensorMeta, ...]
    received_gradients: tuple[_TensorMeta | None, ...]
    sent_gradients: tuple[_TensorMeta | None, ...]

    @staticmethod
    def of(batch: MicroBatch, stage: int) -> _Looks:
        part, shape = batch.part(stage), batch.instance.shape
        values = (part.received, part.sent)
        received, sent = (tuple(_meta(shape(v), v.dtype, v.requires_grad) for v in some) for some in values)
        return _Looks(received, sent, _derive_grad_metas(received), _derive_grad_metas(sent))


def _meta(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> _TensorMeta:
    return _TensorMeta.from_tensor(torch.empty(shape, dtype=dtype, device="meta").requires_grad_(requires_grad))


class _Made(dict[int, tuple[_RecvInfo, ...]]):
    """Makes an entry when it is first asked for."""

    def __init__(self, make: Callable[[int], tuple[_RecvInfo, ...]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, chunk: int) -> tuple[_RecvInfo, ...]:
        self[chunk] = self._make(chunk)
        return self[chunk]


class _Joined(torch.autograd.Function):
    """The same tensors behind one node: no views, contiguous, and with contiguous gradients, zeros where none came.

    torch's stages detach what they sent in place and send gradients as they are. That all paths of a stage end in one
    node lets its backward be split where a parameter's has nothing else in common with those of the inputs.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach().contiguous() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    joined = iter(_Joined.apply(*(tensor for tensor in tensors if tensor.requires_grad)))
    return tuple(next(joined) if tensor.requires_grad else tensor.detach().contiguous() for tensor in tensors)


def _as_it_is(output: Any, labels: Any) -> Any:
    return output
