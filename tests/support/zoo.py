"""Tiny transformers models of every family that is traced, their inputs, and what one training step of one gives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

VOCABULARY = 97
SHAPES = ((2, 7), (5, 11))
Inputs = dict[str, Any]


def tokens(batch: int, length: int, *, padded: bool = True, labels: bool = True, **constants: Any) -> Inputs:
    """Ids (batch, length), the same in every call; ``padded``: a mask without the last two of the first sequence."""
    random = torch.Generator().manual_seed(100 * batch + length)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    masks = {"attention_mask": mask} if padded else {}
    targets = {"labels": ids.masked_fill(mask == 0, -100)} if labels else {}
    return {"input_ids": ids, **masks, **targets, **constants}


def decoder_tokens(batch: int, length: int, **options: Any) -> Inputs:
    return tokens(batch, length, **{"use_cache": False, **options})


def sequence_pair(batch: int, length: int, **options: Any) -> Inputs:
    """``tokens`` for the encoder; labels of another length, of which two do not count."""
    labels = tokens(batch, length + 3)["labels"].flip(1)
    return decoder_tokens(batch, length, **options) | {"labels": labels}


def images(batch: int, length: int) -> Inputs:
    """Pictures that are not square, and their classes."""
    random = torch.Generator().manual_seed(100 * batch + length)
    pixels = torch.randn(batch, 3, 8 * length, 8 * length + 16, generator=random, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (batch,), generator=random)}


@dataclass(frozen=True)
class Family:
    """``sizes`` are the arguments of the config class; ``paths`` names one module of every level."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    inputs: Callable[..., Inputs]
    paths: Mapping[str, str] = field(default_factory=dict)
    # transformers has no scaled_dot_product_attention for some
    attention: str = "sdpa"
    dtype: torch.dtype = torch.float64

    @property
    def levels(self) -> dict[str, str]:
        return {"root": "", **self.paths}


def _paths(block: str, attention: str, feed_forward: str, **more: str) -> dict[str, str]:
    return {
        "block": block,
        "attention": f"{block}.{attention}",
        "feed_forward": f"{block}.{feed_forward}",
        **{level: f"{block}.{path}" for level, path in more.items()},
    }


_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_WIDE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, **_ENDS}
_BERT = {**_WIDE, "num_hidden_layers": 2, "intermediate_size": 48}
_ENCODER_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "attention_dropout": 0.1}
_BERT_PATHS = {"attention": "attention.self", "feed_forward": "intermediate"}
_LLAMA_PATHS = _paths("model.layers.1", "self_attn", "mlp", norm="input_layernorm")

FAMILIES = {
    "bert": Family(
        "BertForMaskedLM", "BertConfig", {**_BERT, **_ENCODER_DROPOUT}, tokens,
        _paths("bert.encoder.layer.1", **_BERT_PATHS, output="output"),
    ),
    "roberta": Family(
        "RobertaForMaskedLM", "RobertaConfig", {**_BERT, **_ENCODER_DROPOUT}, tokens,
        _paths("roberta.encoder.layer.1", **_BERT_PATHS),
    ),
    # one group of weights for all layers: the traced block runs twice in a forward
    "albert": Family(
        "AlbertForMaskedLM", "AlbertConfig", {**_BERT, **_ENCODER_DROPOUT, "embedding_size": 16}, tokens,
        _paths("albert.encoder.albert_layer_groups.0", "albert_layers.0.attention", "albert_layers.0"),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_ENDS},
        decoder_tokens, _paths("transformer.h.1", "attn", "mlp"),
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM", "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, **_ENDS,
         "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 64,
         "embed_dropout": 0.1, "attention_dropout": 0.1, "resid_dropout": 0.1},
        decoder_tokens, _paths("transformer.h.1", "attn.attention", "mlp"), "eager",
    ),
    # its feed-forward is written out in the block, so a linear stands for it
    "opt": Family(
        "OPTForCausalLM", "OPTConfig",
        {**_WIDE, "num_hidden_layers": 2, "ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.1},
        decoder_tokens, _paths("model.decoder.layers.1", "self_attn", "fc1"),
    ),
    "t5": Family(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        sequence_pair,
        _paths("decoder.block.1", "layer.0.SelfAttention", "layer.2.DenseReluDense",
               cross_attention="layer.1.EncDecAttention")
        # the first block's attention makes the relative positions of all
        | {"positions": "encoder.block.0.layer.0.SelfAttention"},
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _LLAMA, decoder_tokens, _LLAMA_PATHS),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}, decoder_tokens,
        _paths("model.layers.1", "self_attn", "mlp"),
    ),
    "mistral": Family(
        "MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 6}, decoder_tokens,
        _paths("model.layers.1", "self_attn", "mlp"),
    ),
    # the experts' grouped product knows no float64
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        decoder_tokens, _paths("model.layers.1", "self_attn", "mlp", router="mlp.gate"),
        dtype=torch.float32,
    ),
    # no attention: a stage is the block, its bottleneck layer has the feed-forward's place
    "resnet": Family(
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "bottleneck", "num_labels": 5},
        images,
        {"block": "resnet.encoder.stages.1", "feed_forward": "resnet.encoder.stages.1.layers.0",
         "convolution": "resnet.embedder.embedder"},
        "eager",
    ),
}  # fmt: skip


def make(name: str, attention: str | None = None) -> Any:
    """A model of family ``name`` in train mode, with the same weights in every call."""
    return copy.deepcopy(_template(name, attention or FAMILIES[name].attention))


def config_of(name: str, attention: str | None = None) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.sizes)
    config._attn_implementation = attention or family.attention
    return config


@functools.cache
def _template(name: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[name].model)(config_of(name, attention))
    with torch.no_grad():
        for parameter in model.parameters():
            # biases and norms start at 0 and 1, where one that is lost would not show
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(FAMILIES[name].dtype).train()


@dataclass
class Step:
    """Everything that a call and its backward leave behind."""

    outputs: list[Any]
    structure: Any
    differentiable: list[bool]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random: Tensor


def step(model: nn.Module, args: tuple[Any, ...] = (), seed: int = 0, **kwargs: Any) -> Step:
    """Run ``model`` forward, and backward from its loss and all other outputs that have a gradient."""
    torch.manual_seed(seed)
    model.zero_grad()
    outputs, structure = tree_flatten(model(*args, **kwargs))
    with torch.enable_grad():
        sums = [x.square().mean() for x in outputs if isinstance(x, Tensor) and x.requires_grad and x.numel()]
        if sums:
            torch.stack([x.double() for x in sums]).sum().backward()
    return Step(
        [x.detach().clone() if isinstance(x, Tensor) else x for x in outputs],
        structure,
        [isinstance(x, Tensor) and x.requires_grad for x in outputs],
        {name: p.grad for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
        torch.get_rng_state(),
    )


def assert_same(got: Step, expected: Step, rounding: float = 0.0) -> None:
    """Bit for bit, or to ``rounding``; also the kinds of the outputs, the buffers, and how many random numbers were
    drawn."""
    assert got.structure == expected.structure
    assert got.differentiable == expected.differentiable
    for i, (x, y) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        assert same(x, y, rounding), f"output {i}: {difference(x, y)}"
    for kind in ("gradients", "buffers"):
        ours, theirs = getattr(got, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        wrong = {name: difference(ours[name], x) for name, x in theirs.items() if not same(ours[name], x, rounding)}
        assert not wrong, f"{kind}: {wrong}"
    assert torch.equal(got.random, expected.random), "another number of random numbers was drawn"


def same(x: Any, y: Any, rounding: float = 0.0) -> bool:
    """Equal values of equal types; NaN equals NaN."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.dtype, x.shape, x.device) != (y.dtype, y.shape, y.device):
            return False
        return torch.equal(x, y) or torch.allclose(x, y, rtol=rounding, atol=rounding, equal_nan=True)
    return type(x) is type(y) and bool(x == y)


def difference(x: Any, y: Any) -> str:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype:
        return f"differs by {(x.double() - y.double()).abs().max():.3g}"
    kinds = [f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in (x, y)]
    return f"{kinds[0]}, expected {kinds[1]}"
