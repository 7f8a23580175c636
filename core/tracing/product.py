"""The product of a decomposed linear: a call in the graph of its parent that leaves the bias to the graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import GuardError
from ..execution import fetch_parameters, has_users_hooks, run
from ..patterns import Attribute
from ..roles import keeps_in_out, multiply_without_bias


class Product:
    """``product(parent, x)``: what the linear at ``path`` gives without its bias, its shards and syncs included."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.__name__ = self.__qualname__ = "product"
        self.__module__ = __name__

    def __call__(self, parent: nn.Module, x: Tensor) -> Tensor:
        linear = parent.get_submodule(self.path)
        if has_users_hooks(linear):
            raise GuardError(f"{self.path!r} has hooks, which are not called since decompose(): put them on its parent")
        fetch_parameters(linear)
        return run(linear, functools.partial(multiply_without_bias, linear), (x,), {}, with_bias=False)

    def twin_arguments(self, parent: nn.Module, args: tuple[Any, ...]) -> tuple[Any, Mapping[str, Any]]:
        """To patterns it is ``F.linear(x, weight)``, or ``x @ weight`` where the weight is kept as (in, out)."""
        weight = Attribute(f"{self.path}.weight")
        if keeps_in_out(parent.get_submodule(self.path)):
            return torch.matmul, {"input": args[1], "other": weight}
        return functional.linear, {"input": args[1], "weight": weight}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Product) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"product of {self.path!r}"
