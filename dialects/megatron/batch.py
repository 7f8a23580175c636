"""What a stage is called with: Megatron's arguments, or transformers' own, as the model's arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partbook.core import AgreementError
from partbook.core.execution import argument_names
from partbook.core.pipeline import refuse_unknown

from ..micro_batches import arguments_of


def model_arguments(
    model: nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments that the model is to be called with, without labels; those that are None are left out.

    Megatron's loaders give position ids and 4-D masks to some stages only, so a model that makes both itself is left
    to do so; what they say is checked to be what it makes. Raises ValueError for what the model does not take.
    """
    given = {"input_ids": input_ids, **others}
    if position_ids is not None:
        torch._assert_async(
            (position_ids == torch.arange(position_ids.shape[-1], device=position_ids.device)).all(),
            "position ids that start again inside a sequence (reset_position_ids) do not reach all stages",
        )
    if attention_mask is not None and attention_mask.dim() == 4:
        _check_causal(model, attention_mask)
    else:
        given["attention_mask"] = attention_mask
    named = {name: value for name, value in given.items() if value is not None}
    refuse_unknown(model, named)
    is_decoding = "decoder_input_ids" in argument_names(model)
    if labels is not None and is_decoding and not named.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        named["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
    return arguments_of(named)


def _check_causal(model: nn.Module, mask: Tensor) -> None:
    """``mask``: True where a key is hidden, as Megatron has it."""
    config: Any = getattr(model, "config", None)
    is_decoder = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    if not is_decoder or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} takes no mask {list(mask.shape)}: pass transformers' attention_mask [b, s], 1 for "
            "tokens and 0 for padding"
        )
    length = mask.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    torch._assert_async(
        (mask.bool() == causal).all(), "a mask that is not just causal (reset_attention_mask) does not reach all stages"
    )


class StageNames:
    """That all stages are called with the same arguments: what one lacks, it would silently do without.

    The first stage leaves the names of its first call where the others, which it sends to, find them. What a stage is
    called with later it must have been called with first, training and evaluating each by itself.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._known: dict[bool, set[str]] = {}

    def check(self, names: set[str], training: bool, stage: int) -> None:
        # Where it is missing, it is told by what was received.
        names = names - {"input_ids"}
        if training in self._known:
            self._refuse(self._known[training], names, f"stage {stage} was called", f"stage {stage} is now called")
            return
        key = f"{self._key}/{training}"
        if stage == 0:
            self._store.set(key, ",".join(sorted(names)) or "-")
        else:
            first = set(self._store.get(key).decode().split(",")) - {"-"}
            self._refuse(first, names, "the first stage was called", f"stage {stage} is called")
        self._known[training] = names

    @staticmethod
    def _refuse(before: set[str], names: set[str], what: str, now: str) -> None:
        if before != names:
            raise AgreementError(
                f"{what} with {_listed(before)}, and {now} with {_listed(names)}\n"
                "  hint: have the loader give each stage the whole batch, and every batch the same entries (a mask of "
                "ones where nothing is padded)"
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "ids alone"
