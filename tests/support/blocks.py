"""A small Transformer in plain PyTorch for the graph primitives; the patterns of its parts and what replaces them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partbook.core import Mesh, Schedule, ScheduledModel, build, cat, create_schedule, gradients, module

ATTENTION, FEED = "0.attn", "0.feed"


class Attention(nn.Module):
    """(B, T, 8) -> (B, T, 8) with 2 heads of 4; ``mask`` is added to the scores."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.p = p

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, 4).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, 4).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, 4).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.5
        if mask is not None:
            scores = scores + mask
        probs = functional.dropout(functional.softmax(scores, dim=-1), self.p, self.training)
        return self.o_proj(torch.matmul(probs, v).transpose(1, 2).reshape(batch, length, -1))


class Feed(nn.Module):
    """(B, T, 8) -> (B, T, 8): a GELU layer, dropout, residual and norm, as BERT has them."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop, self.norm = nn.Dropout(p), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return self.norm(self.drop(self.down(hidden)) + x)


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attn, self.feed = Attention(p), Feed(p)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.feed(x + self.attn(x, mask))


class Net(nn.ModuleList):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self:
            x = block(x, mask)
        return x


def net(p: float = 0.0, layers: int = 1, dtype: torch.dtype = torch.float64) -> Net:
    """The same weights in every call."""
    torch.manual_seed(0)
    return Net(Block(p) for _ in range(layers)).to(dtype)


def batch(length: int = 5, mask: bool = True, seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """``x`` and, if asked for, a mask that hides the last two positions of the first sequence."""
    x = torch.randn(2, length, 8, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if not mask:
        return {"x": x}
    hidden = torch.zeros(2, 1, 1, length, dtype=dtype)
    hidden[0, ..., -2:] = -1e4
    return {"x": x, "mask": hidden}


def scheduled(
    path: str = ATTENTION, *, mask: bool = True, mesh: Mesh | None = None, **options: Any
) -> tuple[Schedule, Schedule]:
    """A schedule of a net, and its node at ``path``, traced for calls with or without a mask."""
    sch = create_schedule(net(**options), mesh)
    given = batch(mask=mask, dtype=options.get("dtype", torch.float64))
    return sch, sch[path].trace(inputs=given)


def qkv(x):  # type: ignore[no-untyped-def]
    return module("q_proj")(x), module("k_proj")(x), module("v_proj")(x)


QKV: Any = {name: cat([f"{part}.{name}" for part in ("q_proj", "k_proj", "v_proj")]) for name in ("weight", "bias")}


def fused_qkv(attention: Any) -> nn.Linear:
    return nn.Linear(8, 24, dtype=attention.q_proj.weight.dtype, device="meta")


def core(q, k, v, mask, p, training):  # type: ignore[no-untyped-def]
    scores = torch.matmul(q, k.transpose(-2, -1)) * 0.5 + mask
    return torch.matmul(functional.dropout(functional.softmax(scores, dim=-1), p, training), v)


def core_without_mask(q, k, v, p, training):  # type: ignore[no-untyped-def]
    scores = torch.matmul(q, k.transpose(-2, -1)) * 0.5
    return torch.matmul(functional.dropout(functional.softmax(scores, dim=-1), p, training), v)


def efficient(q, k, v, mask, p, training):  # type: ignore[no-untyped-def]
    return functional.scaled_dot_product_attention(q, k, v, mask, p if training else 0.0, scale=0.5)


def efficient_without_mask(q, k, v, p, training):  # type: ignore[no-untyped-def]
    return efficient(q, k, v, None, p, training)


def bias_gelu(x, bias):  # type: ignore[no-untyped-def]
    return functional.gelu(x + bias)


def drop_add_norm(x, residual):  # type: ignore[no-untyped-def]
    return module("norm")(module("drop")(x) + residual)


def trained(model: nn.Module, given: dict[str, Tensor], seed: int = 3) -> Tensor:
    """The output of a forward after ``seed``, whose backward has left gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(**given)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return output.detach()


def assert_trains_like(
    sch: Schedule | ScheduledModel, dense: nn.Module, given: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Output and every gradient, by its original name, as those of ``dense`` for the same seed."""
    done = build(sch) if isinstance(sch, Schedule) else sch
    model = done.model
    close(trained(model, given), trained(dense, given), tolerance, "output")
    wanted = {name: parameter.grad for name, parameter in dense.named_parameters() if parameter.grad is not None}
    found = gradients(done)
    for each in (model, dense):
        each.zero_grad()
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        close(found[name], grad, tolerance, name)


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    limit = tolerance * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit, msg=lambda text: f"{what}: {text}")
