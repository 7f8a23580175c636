"""Ranks of one tp group must see the same batches: the first one is compared."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from partbook.core import AgreementError, Mesh


def check_first_batch(model: nn.Module, mesh: Mesh) -> None:
    """Compare what the ranks of a tp group call ``model`` with the first time, training and evaluating.

    Raises AgreementError on every rank of the group, naming the argument that differs.
    """
    if mesh.tp == 1 or mesh.is_virtual:
        return
    checked: set[bool] = set()

    @torch.compiler.disable
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training in checked:
            return
        checked.add(module.training)
        mine = digest(args, kwargs)
        everyone: list[Any] = [None] * mesh.tp
        dist.all_gather_object(everyone, mine, group=mesh.tp_group)
        if len(checked) == 2:
            handle.remove()
        _refuse_differences(everyone, mesh)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)


def _refuse_differences(everyone: list[dict[str, str]], mesh: Mesh) -> None:
    for name in sorted({key for one in everyone for key in one}):
        seen = [one.get(name, "nothing") for one in everyone]
        if len(set(seen)) == 1:
            continue
        first = mesh.rank - mesh.tp_rank
        ranks = ", ".join(f"rank {first + i}: {text}" for i, text in enumerate(seen))
        raise AgreementError(
            f"the ranks of one tp group must see the same batches, but {name} differs ({ranks})\n"
            f"  hint: split the data over the {mesh.dp} data-parallel ranks, not over all {mesh.size}: "
            f"DistributedSampler(dataset, num_replicas={mesh.dp}, rank=<global rank> // {mesh.tp}), "
            "and seed data order equally within a tp group"
        )


def digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """The content of a call's arguments, by name, as text that can be compared and shown."""
    leaves, _ = tree_flatten_with_path((list(args), kwargs))
    return {_name(path): _text(value) for path, value in leaves if isinstance(value, Tensor | int | float | str | bool)}


def _name(path: Any) -> str:
    where = keystr(path)
    return f"argument {where[3:]}" if where.startswith("[0]") else f"argument {where.removeprefix('[1]')}"


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} #{hashlib.sha256(raw).hexdigest()[:8]}"
