"""Example inputs of a model, with which its modules are traced: only their shapes and dtypes matter."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Different from each other: equal sizes would be taken for one.
_BATCH, _LENGTH, _SHORT, _CHOICES = 2, 7, 5, 3
_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "LMHead")


@dataclass(frozen=True)
class TensorLike:
    """The shape and dtype of a tensor, in the place of its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def make(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def shapes_of(inputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The inputs with a TensorLike for each tensor."""
    if inputs is None:
        return None
    return pytree.tree_map(lambda x: TensorLike(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x, dict(inputs))


def tensors_of(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inputs with tensors of zeros on the device of the model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return pytree.tree_map(
        lambda x: x.make(device) if isinstance(x, TensorLike) else x,
        dict(inputs),
        is_leaf=lambda x: isinstance(x, TensorLike),
    )


def default_inputs(model: nn.Module, multiple: int = 1) -> list[dict[str, Any]]:
    """What a transformers model is trained with: with a padding mask and without; empty for any other model.

    Lengths divide by ``multiple``, as sequence parallelism wants.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return []
    known = inspect.signature(type(model).forward).parameters
    labels = type(model).__name__.endswith(_LANGUAGE)
    if model.main_input_name == "pixel_values":
        config: Any = model.config
        return [{"pixel_values": TensorLike((_BATCH, getattr(config, "num_channels", 3), 64, 96), torch.float32)}]
    if model.main_input_name != "input_ids":
        return []
    lead = (_BATCH, _CHOICES) if type(model).__name__.endswith("ForMultipleChoice") else (_BATCH,)
    ids = TensorLike((*lead, _LENGTH * multiple), torch.int64)
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in known:
        inputs["labels" if labels else "decoder_input_ids"] = TensorLike((_BATCH, _SHORT * multiple), torch.int64)
    elif labels and "labels" in known:
        inputs["labels"] = ids
    return [{**inputs, "attention_mask": ids}, inputs] if "attention_mask" in known else [inputs]
