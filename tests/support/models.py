"""Tiny models of the families that the schedules name, and batches that touch the edges of a sharded vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 99


def gpt2(
    *, vocab: int = VOCABULARY, tied: bool = True, dropout: float = 0.0, layers: int = 2, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A GPT-2 with the same weights in every call; 4 heads of 8, no dropout unless asked for."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32, "vocab_size": vocab}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **rates, **ends, "tie_word_embeddings": tied, **config}))
    _randomise_biases(model)
    return model


def llama(**options: Any) -> PreTrainedModel:
    """A Llama: 4 heads of 8, 2 key-value heads."""
    return _decoder(LlamaForCausalLM, LlamaConfig, **options)


def mistral(**options: Any) -> PreTrainedModel:
    """Llama's shape with a sliding window that is shorter than the sequences of ``batch``."""
    return _decoder(MistralForCausalLM, MistralConfig, **{"sliding_window": 8, **options})


def qwen2(**options: Any) -> PreTrainedModel:
    """Llama's shape with biases on q, k and v only."""
    return _decoder(Qwen2ForCausalLM, Qwen2Config, **options)


def bert(
    *, cls: Any = BertForMaskedLM, vocab: int = VOCABULARY, tied: bool = True, dropout: float = 0.0, layers: int = 2,
    seed: int = 0, **config: Any,
) -> PreTrainedModel:  # fmt: skip
    """A BERT with 4 heads of 8; ``cls``: the head on it."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = cls(BertConfig(**{**sizes, **heads, "vocab_size": vocab, "tie_word_embeddings": tied, **config}))
    _randomise_biases(model)
    return model


def t5(
    *, cls: Any = T5ForConditionalGeneration, config_cls: Any = T5Config, vocab: int = VOCABULARY, tied: bool = True,
    gated: bool = False, dropout: float = 0.0, layers: int = 2, seed: int = 0, **config: Any,
) -> PreTrainedModel:  # fmt: skip
    """A T5 with 4 heads of 8. ``gated``: as version 1.1. Not ``tied``: the head has a weight of its own."""
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers, "num_heads": 4, "dropout_rate": dropout}
    form = {"feed_forward_proj": "gated-gelu" if gated else "relu", "relative_attention_num_buckets": 8}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = cls(config_cls(**{**sizes, **form, **ends, "vocab_size": vocab, "tie_word_embeddings": tied, **config}))
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    _randomise_biases(model)
    return model


def _decoder(
    cls: Any, config_cls: Any, *, vocab: int = VOCABULARY, tied: bool = False, kv_heads: int = 2, layers: int = 2,
    dropout: float = 0.0, seed: int = 0, **config: Any,
) -> PreTrainedModel:  # fmt: skip
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "attention_dropout": dropout}
    model = cls(config_cls(**{**sizes, **heads, "vocab_size": vocab, "tie_word_embeddings": tied, **config}))
    _randomise_biases(model)
    return model


def _randomise_biases(model: PreTrainedModel) -> None:
    """Biases and norms start at 0 and 1, where a bias that is lost or added twice would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def batch(
    *, vocab: int = VOCABULARY, size: int = 4, length: int = 16, seed: int = 1, padded: bool = False
) -> dict[str, Tensor]:
    """Ids and labels (size, length), equal in every call with one seed.

    Every sequence holds the ids 0, vocab // 2 and vocab - 1, the first and the last of a rank's slice. Sequence i has
    2 i labels that do not count. ``padded``: an attention mask, padding left and right in turn.
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (size, length), generator=random)
    ids[:, 3:6] = torch.tensor([0, vocab // 2, vocab - 1])
    labels = ids.clone()
    for i in range(size):
        labels[i, 7 : 7 + 2 * i] = -100
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[0::2, :3] = 0
    mask[1::2, -2:] = 0
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


def pair(*, padded: bool = False, **options: Any) -> dict[str, Tensor]:
    """A batch for an encoder-decoder, whose labels are shorter than its ids."""
    found = batch(padded=padded, **options)
    return {**found, "labels": found["labels"][:, -10:].flip(1)}


def on_meta(make: Callable[..., nn.Module], **options: Any) -> Any:
    """``make``'s model without memory for its weights, as a user builds one that no rank could hold."""
    with torch.device("meta"):
        return make(**options)


class Toy(nn.Module):
    """Every kind of module that a split has a rule for: ids (B, S) -> logits (B, S, vocab); ``head`` may be tied."""

    def __init__(self, *, vocab: int = 10, tied: bool = True, **embedding: Any) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.words = nn.Embedding(vocab, 8, **embedding)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, vocab, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        return self.head(hidden + self.down(self.drop(self.act(self.up(self.norm(hidden))))))
