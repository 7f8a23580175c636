"""What Megatron's settings do to gradients: 16 bits, losses by token, fused accumulation, frozen parameters."""

import copy
import types
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

import megatron_training as megatron
import models
from partbook.dialects.megatron import consolidate, gradients, model_provider
from ranks import on_ranks


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4, floor: float = 1e-3) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        error = float((found[name].float() - grad.float()).abs().max())
        assert error <= rtol * max(float(grad.abs().max()), floor * largest), (name, error)


def gradients_of(dense: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}


def one_rank_of(step: int, padded: bool = False) -> list[dict[str, Tensor]]:
    return [part for [part] in megatron.batches_of(step, padded=padded)]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@on_ranks(2)
def test_sixteen_bits_train_as_the_model_in_sixteen_bits(rank: int, tp: int, pp: int, kind: str) -> None:
    """With weights of 32 bits, which the optimizer steps."""
    megatron.start(tp, pp)
    dense = models.llama(layers=2).train()
    scale = 2.0**12 if kind == "fp16" else 1.0
    settings = {"initial_loss_scale": scale} if kind == "fp16" else {}
    training = megatron.train("llama", dense, config={kind: True}, optimizer=settings)
    twin = copy.deepcopy(dense).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.5)
    for step in range(4):
        batches = one_rank_of(step)
        found: dict[str, Tensor] = {}
        loss, norm = training.step(batches, lambda found=found: found.update(gradients(training.chunks)))
        wanted = torch.stack([twin(**batch).loss.float() for batch in batches]).mean()
        torch.testing.assert_close(loss, wanted.detach(), rtol=3e-3, atol=0)
        (wanted * scale).backward()
        for main, narrow in zip(dense.parameters(), twin.parameters(), strict=True):
            main.grad, narrow.grad = narrow.grad.float() / scale, None
        close({name: grad.float() / scale for name, grad in found.items()}, gradients_of(dense), rtol=0.05, floor=0.01)
        exact = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        torch.testing.assert_close(torch.tensor(norm), exact, rtol=2e-2, atol=0)
        optimizer.step()
        with torch.no_grad():
            for main, narrow in zip(dense.parameters(), twin.parameters(), strict=True):
                narrow.copy_(main)
    # Two roundings of numbers that differ in the last place of 32 bits.
    precision = torch.finfo(twin.dtype).eps
    for name, value in consolidate(training.chunks).items():
        torch.testing.assert_close(value, twin.get_parameter(name).detach(), rtol=2 * precision, atol=1e-3)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@on_ranks(2)
def test_losses_are_averaged_over_the_tokens_of_all_micro_batches(rank: int, tp: int, pp: int) -> None:
    megatron.start(tp, pp)
    dense = models.gpt2()
    training = megatron.train("gpt2", dense, config={"calculate_per_token_loss": True})
    batches = one_rank_of(0, padded=True)
    for i, batch in enumerate(batches):
        batch["labels"][:, : 2 * i] = -100
    training.run(batches)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert len(set(counts)) > 1
    sum(dense(**batch).loss * count for batch, count in zip(batches, counts, strict=True)).div(sum(counts)).backward()
    close(gradients(training.chunks), gradients_of(dense))


def accumulate(x: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """What Apex's CUDA kernel does."""
    main_grad.addmm_(grad_output.t(), x)


@pytest.mark.parametrize("options", [{}, {"fuse_activation": True}, {"sequence_parallel": True}], ids=str)
@on_ranks(2)
def test_fused_accumulation_adds_every_gradient_once(rank: int, options: dict[str, Any]) -> None:
    """A tied head, whose weight takes the embedding's gradient too, and fused projections."""
    megatron.start(tp=2)
    dense = models.gpt2()
    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
    ):
        training = megatron.train("gpt2", dense, options=options, config={"gradient_accumulation_fusion": True})
        batches = one_rank_of(0)
        training.run(batches)
    fused = [p for p in training.chunks[0].parameters() if getattr(p, "grad_added_to_main_grad", False)]
    assert fused
    torch.stack([dense(**batch).loss for batch in batches]).mean().backward()
    close(gradients(training.chunks), gradients_of(dense))


FROZEN = {
    "all but biases": lambda name: not name.endswith("bias"),
    "the lower half": lambda name: name.startswith(("transformer.wte", "transformer.wpe", "transformer.h.0.")),
    "the encoder": lambda name: name.startswith(("shared", "encoder")),
}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("family", "frozen"), [("gpt2", "all but biases"), ("gpt2", "the lower half"), ("t5", "the encoder")]
)
@on_ranks(2)
def test_frozen_parameters_leave_the_gradients_of_the_others(
    rank: int, family: str, frozen: str, tp: int, pp: int
) -> None:
    megatron.start(tp, pp)
    dense = getattr(models, family)(tied=False)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))

    def build() -> nn.Module:
        return copy.deepcopy(dense)

    cuts = {"gpt2": "transformer.h.0", "t5": "encoder"}[family] if pp > 1 else None
    provider = model_provider(build, family, cuts=cuts)
    training = megatron.wrap(megatron.provide(provider))
    batches = one_rank_of(0)
    training.run(batches)
    torch.stack([dense(**batch).loss for batch in batches]).mean().backward()
    close(gradients(training.chunks), gradients_of(dense))
