"""The transformers models that ``tracing.py`` and ``fusion.py`` measure; every process makes the same weights."""

from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The size of the Llama in tensor_parallel.py, for each family.
_SMALL = {"vocab_size": 8192}
_SMALL_LLAMA = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376,
    "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_7B = {**_SMALL_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "intermediate_size": 11008}  # fmt: skip
_SMALL_BERT = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}

# name -> transformers' class, the settings of its configuration, where its blocks are, its attention and MLP in a block
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "gpt2": ("GPT2LMHeadModel", {**_SMALL, "n_embd": 512, "n_layer": 8, "n_head": 8}, "transformer.h", ("attn", "mlp")),
    "gpt2-124m": ("GPT2LMHeadModel", {}, "transformer.h", ("attn", "mlp")),
    "llama": ("LlamaForCausalLM", {**_SMALL, **_SMALL_LLAMA}, "model.layers", ("self_attn", "mlp")),
    "llama-7b": ("LlamaForCausalLM", {**_LLAMA_7B, "vocab_size": 32000}, "model.layers", ("self_attn", "mlp")),
    "bert": (
        "BertForMaskedLM", {**_SMALL, **_SMALL_BERT}, "bert.encoder.layer",
        ("attention", "intermediate", "output"),
    ),
}  # fmt: skip


def make(name: str, dtype: str = "fp32", device: str = "cpu") -> nn.Module:
    """The model in training mode; nobody trains with a key-value cache, so it makes none."""
    import transformers

    cls = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    with torch.device(device):
        model = cls(cls.config_class(**MODELS[name][1], use_cache=False))
    return model.to(DTYPES[dtype]).train()


def blocks(name: str, model: nn.Module) -> list[str]:
    """The paths of the blocks."""
    stack = MODELS[name][2]
    return [f"{stack}.{i}" for i in range(len(model.get_submodule(stack)))]


def parts(name: str, model: nn.Module) -> list[str]:
    """The paths of the attention and MLP modules in the blocks."""
    return [f"{block}.{part}" for block in blocks(name, model) for part in MODELS[name][3]]


def ids(model: nn.Module, batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(1))


def witness(model: nn.Module) -> nn.Parameter:
    """The weight of the first norm: only a right backward of all layers gives its gradient."""
    return next(p for name, p in model.named_parameters() if p.dim() == 1 and name.endswith("weight"))
