"""Forwards that are hard to trace, each of which a graph (or several) can hold nevertheless."""

from __future__ import annotations

import math
import operator
from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

Pair = namedtuple("Pair", "a b")


class Triple(torch.autograd.Function):
    """Backward is not the derivative, so that a graph that looked inside would show."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Toy(nn.Module):
    """What the forwards below find on ``self``; x is (batch, length, 8)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)])
        self.named = nn.ModuleDict({"up": nn.Linear(8, 8), "down": self.other})
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.drop, self.relu = nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("triangle", torch.ones(16, 16).tril())
        self.scale, self.calls, self.cache, self.seen = 2.0, 0, None, []
        self.config = SimpleNamespace(scale=2.0, kind="gelu")
        self.plain = torch.arange(8.0)

    def helper(self, x, scale):
        return self.fc(x) * scale


class Sizes:
    """Sizes are numbers to python: what is computed with them, and decided by them."""

    def branch(self, x):
        return x * 2 if x.shape[1] > 3 else x

    def mean(self, x):
        return x.sum(1) / x.shape[1]

    def loop(self, x):
        out = self.fc(x[:, 0])
        for i in range(1, x.shape[1]):
            out = out + x[:, i] * i
        return out

    def slices(self, x):
        half = x.shape[1] // 2 + 1
        return x[:, :half] * x.size(1), x[:, -half:], x[..., : x.shape[-1] // 2]

    def arange(self, x):
        return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(x.size(-1))

    def causal_mask(self, x):
        return self.triangle[: x.shape[1], : x.shape[1]] @ x

    def heads(self, x):
        *lead, width = x.shape
        y = self.fc(x).view(*lead, 2, -1).transpose(1, 2)
        return y.reshape(x.shape[:-1] + (2, width // 2)), y.flatten(2)  # noqa: RUF005

    def products(self, x):
        batch, length, width = x.shape
        return x.view(batch * length, width) * math.sqrt(width), x.new_zeros(batch, length * 2), torch.ones(x.shape)

    def python_numbers(self, x):
        length = x.shape[1]
        return x * float(length) + int(length * 0.5) + math.ceil(length / 2) + max(length, 3) - min(x.shape[0], 2)

    def questions(self, x):
        square = x.shape[0] == x.shape[1] and x.shape[0] != 1 and not x.shape[1] % 2
        return x.mT if square else x * (len(x) + x.dim() + x.numel())

    def is_a_number(self, x):
        return x * 2 if isinstance(x.shape[1], int) and type(x.shape[0]) is int else x * 3

    def looked_up(self, x):
        return x * {4: 2.0, 6: 7.0}.get(x.shape[1], 3.0)

    def as_text(self, x):
        return x * (f"{x.shape[0]}" == "3") + float(str(x.shape[1]))

    def as_index(self, x):
        return x * operator.index(x.shape[1]) + len([1.0] * x.shape[0]) + round(x.shape[1] / 2)

    def rows(self, x):
        return torch.stack([self.fc(row) * i for i, row in enumerate(x, 1)])

    def unpacked(self, x):
        a, b = self.fc(x).chunk(2, -1)
        first, *rest = x.unbind(1)
        return sum((r * w for r, w in zip(rest, range(9), strict=False)), first), a * b, x.split(x.shape[1] // 2 + 1, 1)

    def compared(self, x):
        y = x[:, 1:] if x.shape[1] > 1 else x
        return y.expand_as(x) if y.shape == x.shape else F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))

    def broadcast(self, x):
        return x + x[:1] + x[:, :1].expand(-1, x.shape[1], -1) + x.new_ones(x.shape[1], 1)

    def returned(self, x):
        return x * 2, x.shape[0], [x.shape[1] * 2], x.dim()

    def returned_shape(self, x):
        return x * 2, x.shape

    def returned_quotient(self, x):
        return x * 2, x.numel() / 3, x.shape[1] // 2 + 0.5


class Writes:
    """Writes in place, through every name of what they write to."""

    def alias(self, x):
        z = y = x * 2
        y += 1
        return z

    def view(self, x):
        y = self.fc(x)
        y.view(-1)[:8].mul_(3)
        return y

    def transposed(self, x):
        y = self.fc(x)
        y.mT[:, 0].add_(y.mT[:, 1].detach())
        return y

    def out_argument(self, x):
        out = torch.empty_like(x)
        with torch.no_grad():
            torch.mul(x, 2, out=out)
        return out + x

    def items(self, x):
        y = self.fc(x)
        y[:, 0] = 7
        y[..., 1:3] += x[..., 1:3]
        y[:, -1, 4] = y[:, 0, 5] * 2
        y[y > 1] = 0.5
        return y

    def into_new(self, x):
        out = torch.zeros_like(x)
        out[:, : x.shape[1]] = self.fc(x)
        out.scatter_add_(1, torch.zeros_like(x, dtype=torch.long), x)
        return out.clamp_(max=2).masked_fill_(x > 1, 0.25)

    def argument(self, x):
        x.add_(1)
        return x * 2

    def argument_twice(self, x, y):
        x += 1
        return x * y

    def reads_between(self, x):
        y = self.fc(x)
        first = y.detach().sum()
        y += 1
        second = y.detach().sum()
        y.mul_(2)
        return first, second, y

    def list_items(self, x):
        y = self.fc(x)
        parts = [y[..., :2], y[..., 2:6], y[..., 4:]]
        parts[0] += 1
        parts[1].zero_()
        parts[0], parts[2] = parts[2], parts[0]
        return torch.cat(parts, -1), y

    def leaf_writes(self, x):
        y = self.fc(x)
        z = self.relu(y)
        return F.relu(x * 2, inplace=True) + y, z

    def detached(self, x):
        y = self.fc(x)
        y.detach().mul_(2)
        y.data[0] = 1
        return y


class Modes:
    """What is computed depends on switches of the module and of torch."""

    def training_flag(self, x):
        return self.fc(x) * 2 if self.training else x

    def dropout_rates(self, x):
        return F.dropout(x, 0.1 if self.training else 0.9, True) + self.drop(x) + F.dropout(x, self.drop.p)

    def no_grad_block(self, x):
        with torch.no_grad():
            y = self.fc(x)
        with torch.enable_grad():
            z = self.other(x)
        return y + x.detach(), z

    @torch.no_grad()
    def no_grad_function(self, x):
        return self.fc(x)

    def set_grad(self, x):
        with torch.set_grad_enabled(self.training):
            y = self.fc(x)
        return y * 2

    def asks_grad(self, x):
        return self.fc(x) if torch.is_grad_enabled() else self.other(x)

    def asks_requires_grad(self, x):
        y = self.fc(x)
        return y * 3 if x.requires_grad else (y + 1 if y.requires_grad else y)

    def asks_leaf(self, x):
        return self.fc(x) if x.is_leaf and x.grad_fn is None else self.other(x)

    def autocast(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                z = self.other(x)
        return y, z @ self.fc.weight

    def asks_autocast(self, x):
        return self.fc(x).float() * (2 if torch.is_autocast_enabled("cpu") else 1) + torch.matmul(x, x.mT).sum()

    def dtype(self, x):
        return x.half() * 2 if x.dtype == torch.float32 else x.to(torch.float32) + torch.finfo(x.dtype).eps

    def conversions(self, x):
        y = x.float()
        return x * 1, y * 2, x

    def contiguous(self, x):
        y = x.contiguous()
        with torch.no_grad():
            y.mul_(2)
        return x * 3, y

    def strides(self, x):
        return self.fc(x) if x.is_contiguous() else self.other(x)

    def compiling(self, x):
        return x * 2 if torch.jit.is_tracing() or torch.compiler.is_compiling() or torch.jit.is_scripting() else x

    def is_a_tensor(self, x):
        kinds = isinstance(x, torch.Tensor), torch.is_tensor(x), x.is_floating_point(), x.device.type == "cpu"
        return self.fc(x) * sum(kinds)

    def is_exactly_a_tensor(self, x):
        return self.fc(x) if type(x) is torch.Tensor else self.other(x)

    def is_a_parameter(self, x):
        return self.fc(x) if isinstance(x, nn.Parameter) else self.other(x)

    def random_numbers(self, x):
        return x + torch.rand(x.shape[1], 1) * torch.randn_like(x) + torch.randint(0, 9, (x.shape[-1],))


class Modules:
    """Children, and what python does with them."""

    def twice(self, x):
        return self.fc(self.fc(x) * 2), self.fc(x.mT.reshape(x.shape))

    def shared(self, x):
        return self.named["down"](self.other(x)) + self.named["up"](x)

    def conditional(self, x, use):
        return self.fc(x) if use else self.other(x)

    def kinds(self, x):
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Linear) else layer(x) * 2
        return x * len(self.layers) + hasattr(self, "missing")

    def parameters_themselves(self, x):
        y = F.linear(x, self.fc.weight.detach() + 1, self.fc.bias)
        return y * sum(w.tanh() for w in self.weights) + getattr(self, "other").bias + self.weights[-1]  # noqa: B009

    def batch_statistics(self, x):
        return self.batch_norm(x.mT.reshape(-1, 8)) + self.norm(x).reshape(-1, 8)

    def counted_buffer(self, x):
        with torch.no_grad():
            self.total.add_(x.sum((0, 1)))
            self.total[0] += 1
        return self.fc(x) + self.total.clone()

    def own_method(self, x):
        return self.helper(x, scale=self.scale)

    def custom_gradient(self, x):
        return Triple.apply(self.fc(x)) + 1

    def weight_norm(self, x):
        return self.normed(x) + self.normed.weight.sum()

    def called_with_keyword(self, x):
        return self.fc(input=x) + nn.Linear.forward(self.other, x)


class Values:
    """What goes in and what comes out."""

    def dictionary(self, x):
        return {"a": self.fc(x), "nested": (x * 2, [None, {"b": x + 1}]), 3: "text", "none": None}

    def model_output(self, x):
        return BaseModelOutput(last_hidden_state=self.fc(x), hidden_states=(x * 1, x * 2))

    def boolean_index(self, x):
        return x[x > 0] * 2

    def nothing(self, x):
        self.fc(x)

    def itself(self, x):
        return x, x

    def collections(self, inputs, *, extra):
        return inputs["a"] * inputs["list"][1] + inputs["pair"].b, extra

    def numbers(self, x, n, factor=1.0, flag=False, name="one", none=None):
        y = self.fc(x) * factor + n if name == "one" else x ** (n + 1)
        return y.sum(n % 3) if flag else (y, none)

    def arguments(self, x, *args, scale=1, **others):
        return sum(args, x) * scale + sum(v * len(k) for k, v in others.items())

    def defaults(self, x, found=[], other=None):  # noqa: B006
        return self.fc(x) + len(found) if other is None else other(x)

    def same_object(self, x, y):
        return x * 2 if x is y else x * y

    def constants(self, x):
        return x + torch.tensor([1.0, 2.0]).sum() + torch.tensor(x.shape[1]) + torch.ones(()) * 3


# how a forward is called where x alone is not enough; ``k`` differs from call to call
CALLS = {
    "argument": lambda inner, x, k: (y := x * 1, inner(y)),
    "argument_twice": lambda inner, x, k: inner(y := x * 1, x * 1 if k else y),
    "asks_leaf": lambda inner, x, k: inner(x * 1 if k else x),
    "contiguous": lambda inner, x, k: inner((x.mT.contiguous().mT if k else x) * 1),
    "strides": lambda inner, x, k: inner(x.mT.contiguous().mT if k else x),
    "is_a_parameter": lambda inner, x, k: inner(nn.Parameter(x.detach()) if k else x),
    "conditional": lambda inner, x, k: inner(x, use=True) if k == 2 else inner(x, k == 0),
    "collections": lambda inner, x, k: inner(
        {"a": x, "list": [None, x * 2, k], "pair": Pair(k, x + 1)}, extra=(k, None, "text")
    ),
    "numbers": lambda inner, x, k: inner(x, k, 0.5 * k, flag=k == 1, name="two" if k > 1 else "one"),
    "arguments": lambda inner, x, k: inner(x, *[x * 2] * k, scale=k + 1, **{"ab" * i: x / i for i in range(1, k + 1)}),
    "defaults": lambda inner, x, k: inner(x, other=torch.tanh) if k == 2 else inner(x, *[[1]] * k),
    "same_object": lambda inner, x, k: inner(x, x * 1 if k else x),
}
