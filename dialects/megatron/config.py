"""The TransformerConfig of a transformers model, and what of Megatron's own contradicts the model."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from partbook.core import Mesh, PartbookError

# A field of TransformerConfig, and what transformers' configs call it.
_NAMES = {
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim", "d_kv"),
    "ffn_hidden_size": ("intermediate_size", "d_ff", "n_inner"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "init_method_std": ("initializer_range",),
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate"),
    "hidden_dropout": ("resid_pdrop", "hidden_dropout_prob", "dropout_rate"),
}
_DROPOUTS = ("attention_dropout", "hidden_dropout")
# Those of which the model and Megatron's arguments must say the same.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")
# What the model and its schedule say, or what has no rule here; ignored it would look active.
_OF_MEGATRONS_LAYERS = (
    "mtp_num_layers", "num_moe_experts", "multi_latent_attention", "fp8", "fp4", "enable_autocast", "window_size",
    "defer_embedding_wgrad_compute", "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)  # fmt: skip


class ConfigError(PartbookError, ValueError):
    """A Megatron configuration that does not fit the model, the schedule or the mesh. Nothing was started."""


def transformer_config(model_config: Any, **fields: Any) -> TransformerConfig:
    """The TransformerConfig of a transformers config, for the parallel sizes of ``parallel_state``.

    ``fields`` are TransformerConfig's own and go before what is derived. Raises ConfigError for one that it lacks.
    """
    known = TransformerConfig.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(f"TransformerConfig has no field {name!r}")
    if fields.get("sequence_parallel") and parallel_state.get_tensor_model_parallel_world_size() == 1:
        raise ConfigError(_SEQUENCE_WITHOUT_TP)
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    dtype = fields.get("params_dtype") or _dtype_of(fields)
    derived: dict[str, Any] = {
        "num_layers": layers_of(model_config),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        # Two stages send to each other in both directions, which batched sends of interleaved stages mix up.
        "batch_p2p_comm": virtual is None,
        "overlap_p2p_comm": virtual is not None,
        "deallocate_pipeline_outputs": True,
        # Megatron's default is 0.1, also for a model that has none.
        **dict.fromkeys(_DROPOUTS, 0.0),
    }
    for field, names in _NAMES.items():
        found = _named(model_config, names)
        if found:
            derived[field] = found[0]
    heads, tp = derived.get("num_attention_heads"), derived["tensor_model_parallel_size"]
    if heads and heads % tp:
        raise ConfigError(f"the model has {heads} attention heads, which do not divide by tp={tp}: tp must divide them")
    return TransformerConfig(**{**derived, **fields})


def _dtype_of(fields: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if fields.get("bf16") else torch.float16 if fields.get("fp16") else torch.float32


def layers_of(model_config: Any) -> int:
    """The transformer layers of a model, those of the encoder and of the decoder together."""
    decoder = getattr(model_config, "num_decoder_layers", None) if _is_encoder_decoder(model_config) else None
    return int(model_config.num_hidden_layers) + int(decoder or 0)


def _is_encoder_decoder(model_config: Any) -> bool:
    return bool(getattr(model_config, "is_encoder_decoder", False))


def find_config(
    model_config: Any, given: TransformerConfig | Mapping[str, Any] | None, sequence_parallel: bool | None
) -> TransformerConfig:
    """The TransformerConfig that is given, or Megatron-LM's of its arguments, or a derived one.

    ``sequence_parallel``: what the schedule's option says; None where it has none.
    """
    if isinstance(given, TransformerConfig):
        return given
    variables = sys.modules.get("megatron.training.global_vars")
    if variables is not None and variables._GLOBAL_ARGS is not None:
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(variables.get_args())
        return dataclasses.replace(config, **given) if given else config
    return transformer_config(model_config, **{"sequence_parallel": bool(sequence_parallel), **(given or {})})


def with_sequence(options: Any, config: TransformerConfig) -> Any:
    """The schedule's options, which split the sequence when Megatron's configuration does.

    Raises ConfigError where the schedule alone does.
    """
    asked = getattr(options, "sequence_parallel", None)
    if asked and not config.sequence_parallel:
        raise ConfigError(
            "the schedule splits the sequence, and Megatron's arguments do not: sequence_parallel=True there "
            "(--sequence-parallel)"
        )
    if asked is False and config.sequence_parallel:
        return dataclasses.replace(options, sequence_parallel=True)
    return options


def check(config: TransformerConfig, model_config: Any, mesh: Mesh) -> None:
    """Raise ConfigError for everything in ``config`` that the model contradicts or that the dialect cannot do."""
    problems = [*_contradictions(config, model_config), *_unsupported(config, mesh)]
    if problems:
        raise ConfigError("this configuration of Megatron does not fit:\n  " + "\n  ".join(problems))
    if mesh.rank == 0:
        _warn_of_dropouts(config, model_config)


def _warn_of_dropouts(config: TransformerConfig, model_config: Any) -> None:
    """A warning, not an error: Megatron's defaults are not zero, and nobody may have meant them."""
    for field in _DROPOUTS:
        found, given = (_named(model_config, _NAMES[field]) or [0.0])[0], getattr(config, field)
        if found != given:
            warnings.warn(
                f"{field} is {given} in Megatron's arguments, and {found} in the model, which is what runs: build the "
                f"model with another one, or pass --{field.replace('_', '-')} {found}",
                stacklevel=2,
            )


def _contradictions(config: TransformerConfig, model_config: Any) -> list[str]:
    found = []
    for field in _SHAPE:
        wanted = _wanted(field, model_config)
        given = getattr(config, field)
        if wanted and given not in wanted:
            flag = "--group-query-attention " if field == "num_query_groups" else ""
            flag += "--" + field.replace("_", "-")
            found.append(
                f"{field} is {given} in Megatron's arguments, and {wanted[0]} in the model: {flag} {wanted[0]}"
            )
    return found


def _wanted(field: str, model_config: Any) -> list[Any]:
    """What Megatron may say of the model."""
    if field == "num_layers":
        # Of an encoder and a decoder, Megatron counts both or one.
        return [layers_of(model_config), model_config.num_hidden_layers]
    return _named(model_config, _NAMES[field])


def _named(model_config: Any, names: tuple[str, ...]) -> list[Any]:
    """What a model's config says under these names."""
    values = [getattr(model_config, name, None) for name in names]
    return [value for value in values if value is not None]


def _unsupported(config: TransformerConfig, mesh: Mesh) -> list[str]:
    sizes = {"tensor_model_parallel_size": mesh.tp, "pipeline_model_parallel_size": mesh.pp}
    found = [
        f"{field} is {getattr(config, field)}, and the process groups are of {size}"
        for field, size in sizes.items()
        if getattr(config, field) != size
    ]
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if config.sequence_parallel and mesh.tp == 1:
        found.append(_SEQUENCE_WITHOUT_TP)
    for field in _OF_MEGATRONS_LAYERS:
        if getattr(config, field, None):
            found.append(f"{field}={getattr(config, field)!r} is for Megatron's own layers: leave it out")
    if config.recompute_granularity is not None:
        found.append(
            f"recompute_granularity={config.recompute_granularity!r}: what is recomputed is the schedule's: leave it "
            "out, and give the schedule checkpoint_ratio=1.0"
        )
    if virtual > 1 and mesh.pp == 2 and config.batch_p2p_comm:
        found.append(
            "batch_p2p_comm with interleaved stages on pp=2 mixes up the two directions: batch_p2p_comm=False, "
            "overlap_p2p_comm=True"
        )
    return found


_SEQUENCE_WITHOUT_TP = "sequence parallelism splits the sequence over the tp ranks, and tp is 1: leave it out, or tp=2"
