"""The collectives of one training step: how many, where, how large. A block does two each way, as Megatron's does."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
from partbook.dialects.pytorch import initialize
from ranks import on_ranks

BATCH, LENGTH, HIDDEN, VOCABULARY = 2, 16, 32, 512
TOKENS = BATCH * LENGTH
ACTIVATION = TOKENS * HIDDEN
SP = {"sequence_parallel": True}

# name of a collective and the elements that a rank gives to it -> how often
Counts = Counter[tuple[str, int]]


class Collectives(TorchDispatchMode):
    """Counts every collective that runs while it is open, functional or not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("_c10d_functional", "c10d", "_dtensor") and "wait" not in name:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            # in place or not
            kind = name.partition(".")[0].rstrip("_").replace("allreduce", "all_reduce")
            self.counts[kind, sum(tensor.numel() for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))


def count(family: str, options: dict[str, Any], layers: int, **built_with: Any) -> tuple[Counts, Counts]:
    """(forward, backward) of the second step: the first also compares the batches of the ranks."""
    model = getattr(models, family)(layers=layers, vocab=VOCABULARY, **built_with)
    module, _ = initialize(model, family, options, tp=2)
    batch = models.batch(vocab=VOCABULARY, size=BATCH, length=LENGTH)
    module(**batch)
    with Collectives() as forward:
        loss = module(**batch).loss
    with Collectives() as backward:
        loss.backward()
    for name, elements in [*forward.counts, *backward.counts]:
        assert elements < TOKENS * VOCABULARY / 2, f"{name} of {elements} elements: as large as a rank's logits"
    return forward.counts, backward.counts


# the maximum of the logits; the sum of their exponentials and the logit of the target
LOSS = Counter({("all_reduce", TOKENS): 1, ("all_reduce", 2 * TOKENS): 1})


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("family", "options", "built_with"),
    [("gpt2", {}, {}), ("gpt2", {"fuse_qkv": True}, {"tied": False}), ("llama", {}, {}),
     ("llama", {"fuse_qkv": True, "fuse_gate_up": True}, {"tied": True, "attention_bias": True, "mlp_bias": True})],
)  # fmt: skip
@on_ranks(2)
def test_a_block_sums_twice_forward_and_twice_backward(rank, family, options, built_with, layers):
    forward, backward = count(family, options, layers, **built_with)
    # the embedding, and attention and feed-forward of each block
    assert forward == Counter({("all_reduce", ACTIVATION): 1 + 2 * layers}) + LOSS
    # the head, and the same two
    assert backward == Counter({("all_reduce", ACTIVATION): 1 + 2 * layers})


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("family", "options", "small"),
    # parameters of norms and biases that are added to a slice of the sequence: in each block, after the last
    [("gpt2", {}, (6, 2)), ("llama", {"fuse_qkv": True}, (2, 1))],
)
@on_ranks(2)
def test_sequence_parallelism_moves_as_much_as_it_saves(rank, family, options, small, layers):
    """An all-gather and a reduce-scatter are the two halves of an all-reduce: the bytes stay the same."""
    forward, backward = count(family, {**options, **SP}, layers)
    # an all-gather takes a slice; a reduce-scatter a whole activation
    gather, reduce = ("all_gather_into_tensor", ACTIVATION // 2), ("reduce_scatter_tensor", ACTIVATION)
    whole = ("all_reduce", ACTIVATION)
    # the embedding is summed; the last norm's output is gathered
    assert forward == Counter({whole: 1, gather: 2 * layers + 1, reduce: 2 * layers}) + LOSS
    # the head's; the gradient of the first block's slice is gathered
    assert backward == Counter(
        {whole: 1, gather: 2 * layers + 1, reduce: 2 * layers, ("all_reduce", HIDDEN): small[0] * layers + small[1]}
    )


@on_ranks(2)
def test_recomputation_repeats_the_sums_of_the_forward_pass(rank):
    """All but the last of each block: nothing that its backward needs comes after the second one."""
    layers = 3
    forward, backward = count("llama", {"checkpoint_ratio": 1.0}, layers)
    assert forward == Counter({("all_reduce", ACTIVATION): 1 + 2 * layers}) + LOSS
    assert backward == Counter({("all_reduce", ACTIVATION): 1 + 3 * layers})


@on_ranks(4)
def test_shared_key_value_heads_exchange_their_gradients_only(rank):
    """One kv head on four ranks: k and v of each block are summed, 8 rows of 32 each."""
    model = models.llama(layers=2, vocab=VOCABULARY, kv_heads=1)
    module, _ = initialize(model, "llama", tp=4)
    batch = models.batch(vocab=VOCABULARY, size=BATCH, length=LENGTH)
    module(**batch).loss.backward()
    with Collectives() as both:
        module(**batch).loss.backward()
    assert both.counts == LOSS + Counter({("all_reduce", ACTIVATION): 2 + 4 * 2, ("all_reduce", 8 * HIDDEN): 2 * 2})


@on_ranks(2)
def test_logits_are_gathered_once_where_somebody_sees_them(rank):
    model = models.gpt2(vocab=VOCABULARY)
    module, _ = initialize(model, "gpt2", tp=2)
    batch = models.batch(vocab=VOCABULARY, size=BATCH, length=LENGTH)
    logits = ("all_gather_into_tensor", TOKENS * VOCABULARY // 2)
    for train, inputs, gathers in [
        (True, batch, 0),
        (False, batch, 1),
        (True, {"input_ids": batch["input_ids"]}, 1),
        (False, {"input_ids": batch["input_ids"]}, 1),
    ]:
        module.train(train)
        module(**inputs)
        with Collectives() as found, torch.no_grad():
            module(**inputs)
        assert found.counts[logits] == gathers, (train, list(inputs))


@pytest.mark.parametrize("options", [{}, {"fuse_qkv": True, "fuse_gate_up": True}], ids=["plain", "fused"])
@on_ranks(2)
def test_backward_hooks_on_every_module_leave_four_all_reduces_a_block_and_no_gather(rank, options):
    """Profilers and torch's CommDebugMode set them: each of the siblings that share one product is called with a view
    of its own of their input."""
    model = models.llama(layers=3, vocab=VOCABULARY)
    module, _ = initialize(model, "llama", options, tp=2)
    batch = models.batch(vocab=VOCABULARY, size=BATCH, length=LENGTH)
    module(**batch)
    called = set()
    for name, child in model.named_modules():
        child.register_full_backward_hook(lambda module, given, wanted, name=name: called.add(name))
    with Collectives() as found:
        module(**batch).loss.backward()
    assert "model.layers.0.self_attn.q_proj" in called
    # a block's four, the embedding's, the head's, and the loss's two
    assert sum(found.counts.values()) == 4 * 3 + 1 + 1 + 2
    assert not [kind for kind, _ in found.counts if "gather" in kind]
