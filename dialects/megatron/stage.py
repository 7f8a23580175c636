"""One stage of a scheduled model as Megatron wants a model: a MegatronModule that its schedules drive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partbook.core import ScheduledModel
from partbook.core.execution import argument_names
from partbook.core.loss import loss_follows
from partbook.core.pipeline import Instance, Wiring, share
from partbook.core.tracing.examples import TensorLike, shapes_of, tensors_of

from .batch import StageNames, model_arguments
from .loss import TokenLoss
from .saving import sharded_state_dict
from .wire import Wire


class StageModel(MegatronModule):
    """The modules of one stage under their original paths, run as Megatron runs a model.

    Called with ``labels`` [b, s], already shifted, the last stage gives the loss of each token [b, s]; without them
    logits [b, s, v/tp]. The others give what the next one receives by ``set_input_tensor``: [s, b, h], or several
    tensors packed. ``scheduled`` is the scheduled model; all chunks of a rank have the same.
    """

    # Megatron's schedules look for layers below an attribute of this name, which encoder-decoders have too.
    decoder = None

    def __init__(
        self, config: TransformerConfig, scheduled: ScheduledModel, module: nn.Module, index: int,
        vp_stage: int | None, groups: Any, wires: list[Wire], loss: TokenLoss, names: StageNames | None,
    ) -> None:  # fmt: skip
        super().__init__(config)
        share(self, module)
        self.__dict__["inner"] = module
        self.scheduled, self.index, self.vp_stage, self.pg_collection = scheduled, index, vp_stage, groups
        self.tp_group = groups.tp
        self.pre_process, self.post_process = index == 0, index == len(wires)
        self.model_type = ModelType.encoder_or_decoder
        self._wires, self._loss, self._names = wires, loss, names
        self._received: Tensor | None = None
        self._tied = _tied_weight(scheduled, module)
        self.share_embeddings_and_output_weights = bool(scheduled.ties_across) or self._tied is not None

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The weight that embedding and head share, on the stages that hold it."""
        return None if self._tied is None else self.inner.get_parameter(self._tied)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before sent; a list of one, None on the first stage."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Any = None,
        runtime_gather_output: bool | None = None,
        *,
        loss_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Megatron's arguments, or by name those that the transformers model takes.

        ``attention_mask``: transformers' [b, s], 1 for tokens; Megatron's own [b, 1, s, s] must be causal.
        """
        for name, value in (
            ("decoder_input", decoder_input), ("inference_context", inference_context),
            ("packed_seq_params", packed_seq_params), ("extra_block_kwargs", extra_block_kwargs),
        ):  # fmt: skip
            if value is not None:
                raise ValueError(f"{name} is for Megatron's own layers, and this is a {self._model_name}")
        skeleton = self.scheduled.original.skeleton
        batch = model_arguments(skeleton, input_ids, position_ids, attention_mask, labels, inputs)
        output = self._run_whole(batch) if self.scheduled.pipeline is None else self._run_stage(batch)
        if not self.post_process:
            return output
        logits = _logits_of(output)
        if labels is None:
            return self._loss.whole(logits) if runtime_gather_output else self._loss.without_padding(logits)
        return self._loss(logits, labels)

    # ------------------------------------------------------------------ the model's own computation

    def _run_whole(self, batch: Mapping[str, Any]) -> Any:
        given = dict(batch)
        if "use_cache" in argument_names(self.inner):
            given.setdefault("use_cache", False)
        with loss_follows():
            return self.inner(**given)

    def _run_stage(self, batch: Mapping[str, Any]) -> Any:
        received, self._received = self._received, None
        if self._names is not None:
            self._names.check(set(batch), self.training, self.index)
        looks = shapes_of(batch) or {}
        if "input_ids" not in looks:
            looks["input_ids"] = self._look_of_ids(received)
        with loss_follows():
            wiring = self.scheduled.pipeline.wiring(looks, self.training)  # type: ignore[union-attr]
            known = self._values(wiring, looks, {})
            instance, values = wiring.at(known), self._values(wiring, looks, batch)
            self._refuse_missing(wiring, values)
            tensors = self._unpack(received, wiring, instance)
            device = next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))
            result = instance.run(self.index, self.inner, tensors, values, device)
        if self.post_process:
            return result
        return self._wires[self.index].pack(wiring.parts[self.index].sent, result, known_batch(known))

    def _values(self, wiring: Wiring, looks: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The model's inputs by their names in the wiring; those that the stage was not given are meta tensors."""
        skeleton = self.scheduled.pipeline.skeleton  # type: ignore[union-attr]
        return wiring.values(skeleton, tensors_of({**looks, **batch}, skeleton))

    def _look_of_ids(self, received: Tensor | None) -> TensorLike:
        """The shape of the ids that Megatron's loaders keep from a stage, by what it received."""
        if received is None or not self._wires[self.index - 1].is_hidden:
            raise ValueError(
                f"stage {self.index} was called without input_ids, which tell the sizes of what it receives\n"
                "  hint: have the loader give each stage the whole batch"
            )
        length, size, _ = received.shape
        if self.config.sequence_parallel:
            length *= self.scheduled.mesh.tp
        return TensorLike((size, length), torch.int64)

    def _refuse_missing(self, wiring: Wiring, values: Mapping[str, Tensor]) -> None:
        for name in wiring.parts[self.index].raw:
            if values[name].is_meta:
                raise ValueError(
                    f"stage {self.index} reads {name!r}, and was called without it\n"
                    "  hint: have the loader give each stage the whole batch"
                )

    def _unpack(self, received: Tensor | None, wiring: Wiring, instance: Instance) -> list[Tensor]:
        if self.pre_process:
            return []
        if received is None:
            raise RuntimeError(f"stage {self.index} received nothing: set_input_tensor comes before the call")
        return self._wires[self.index - 1].unpack(wiring.parts[self.index - 1].sent, received, instance)

    @property
    def _model_name(self) -> str:
        return type(self.scheduled.original.skeleton).__name__

    # ------------------------------------------------------------------ nn.Module and MegatronModule

    def train(self, mode: bool = True) -> StageModel:
        super().train(mode)
        self.inner.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> StageModel:
        """Move or convert; what the model computes with and does not save (rotary frequencies) keeps its dtype."""
        kept = [
            (module, name, module._buffers[name])
            for module in self.modules()
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        ]
        super()._apply(fn, recurse)
        for module, name, before in kept:
            after = module._buffers[name]
            if after.dtype != before.dtype:
                module._buffers[name] = before.to(after.device)
        return self

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoints: the model's own names and shapes, whatever the schedule and mesh."""
        return sharded_state_dict(self, prefix, metadata)


def known_batch(values: Mapping[str, Tensor]) -> int:
    """How many samples a micro-batch has."""
    return next(iter(values.values())).shape[0]


def _logits_of(output: Any) -> Tensor:
    found = output.get("logits") if isinstance(output, Mapping) else None
    if found is None:
        found = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise ValueError(f"the model gives no logits but a {type(output).__name__}")
    return found


def _tied_weight(scheduled: ScheduledModel, module: nn.Module) -> str | None:
    """The name, in a stage, of the weight that embedding and head share, with another stage or in the model."""
    own = {name for name, _ in module.named_parameters()}
    rank = scheduled.mesh.pp_rank
    across = [tie.names[rank] for tie in scheduled.ties_across if rank in tie.names]
    if scheduled.mesh.pp > 1:
        return next((name for name in across if name in own), None)
    model: Any = module
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if embeddings is None or head is None or embeddings.weight is not head.weight:
        return None
    return next(name for name, parameter in module.named_parameters() if parameter is head.weight)
