"""Counts the collectives of a piece of a step: how many there are, and how large."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """``counts``: (name of a collective, the elements that a rank gives to it) -> how often it ran while open."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("_c10d_functional", "c10d", "_dtensor") and "wait" not in name:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            # in place or not
            kind = name.partition(".")[0].rstrip("_").replace("allreduce", "all_reduce")
            self.counts[kind, sum(tensor.numel() for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))
