"""Micro-batches of a pipeline: cut out of a batch, compared by its ranks, and the loss of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partbook.core import AgreementError, Mesh

from .batches import digest

# the model's arguments by name, or those of each micro-batch
Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
_ITEMS = "num_items_in_batch"
# loss_fn(the model's output, labels) -> a scalar
LossFunction = Callable[[Any, Any], Tensor]


def micro_batches_of(batch: Batch, count: int) -> list[dict[str, Any]]:
    """``count`` equal parts of dim 0 of a batch, or the micro-batches themselves.

    The longest tensor says how large the batch is. What is no tensor, a scalar, or of size 1 along dim 0 belongs to all
    of them. Raises ValueError where they do not come out equal.
    """
    if not isinstance(batch, Mapping):
        if not _is_list(batch):
            raise ValueError(
                f"a batch is a {type(batch).__name__}, not a dict of the model's arguments or a list of such dicts"
            )
        return [dict(one) for one in batch]
    sizes = {name: len(value) for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    longest = max(sizes, key=sizes.__getitem__, default="")
    size = sizes.get(longest, 0)
    for name, other in sizes.items():
        if other not in (size, 1):
            raise ValueError(
                f"dim 0 of {name!r} is {other} and of {longest!r} {size}, so the batch cannot be cut into "
                "micro-batches\n  hint: pass a list of micro-batches"
            )
    if not size or size % count:
        raise ValueError(
            f"micro_batches={count} does not divide the batch, which has {size} samples\n"
            "  hint: drop_last=True for the loader, or pass a list of micro-batches"
        )
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        parts = value.chunk(count) if sizes.get(name) == size else [value] * count
        for one, part in zip(found, parts, strict=True):
            one[name] = part
    return found


def arguments_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments in a batch: without those that are None.

    The number of items by which transformers divides a loss, another one in each batch, is a tensor: a number would be
    a constant of the trace.
    """
    found = {name: value for name, value in batch.items() if value is not None}
    if isinstance(found.get(_ITEMS), int | float):
        found[_ITEMS] = torch.tensor(found[_ITEMS])
    return found


def check_same(batch: Batch, mesh: Mesh) -> None:
    """Compare what the ranks of one pipeline, and their tp groups, are given. Collective over them.

    Raises AgreementError on every one of them, naming the entry that differs.
    """
    content = (dict(batch),) if isinstance(batch, Mapping) else tuple(map(dict, batch)) if _is_list(batch) else (batch,)
    named = digest(content, {})
    everyone: list[Any] = [None] * (mesh.pp * mesh.tp)
    dist.all_gather_object(everyone, named, group=mesh.model_group)
    refuse_differences(everyone, mesh)


def refuse_differences(everyone: Sequence[Mapping[str, Any] | None], mesh: Mesh, number: int | None = None) -> None:
    """Raise AgreementError where ranks of this pipeline, each of its stages' tp groups in order, describe different
    batches; None is a rank that has none. ``number`` is the micro-batch's."""
    ranks = [(stage * mesh.dp + mesh.dp_rank) * mesh.tp + i for stage in range(mesh.pp) for i in range(mesh.tp)]
    (first, here), *others = [(rank, one) for rank, one in zip(ranks, everyone, strict=True) if one is not None]
    for rank, there in others:
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                what = name if number is None else f"{name} of micro-batch {number}"
                raise AgreementError(
                    f"the ranks of one pipeline must see the same batches, but {what} differs between ranks {first} "
                    f"and {rank}: {here.get(name, 'nothing')} and {there.get(name, 'nothing')}\n"
                    "  hint: split the data over the data-parallel ranks only, and seed its order equally on the ranks "
                    "of a pipeline"
                )


def _is_list(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and bool(batch) and all(isinstance(one, Mapping) for one in batch)


def loss_of(output: Any, labels: Any, loss_fn: LossFunction | None) -> Tensor:
    """The loss of a micro-batch: the model's own, or ``loss_fn``'s. Raises ValueError where there is none."""
    loss: Any = output.get("loss") if isinstance(output, Mapping) else output
    if loss_fn is not None:
        loss = loss_fn(output, labels)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a {type(loss).__name__}" + (f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else "")
        raise ValueError(
            f"the model's output has no loss but {what}\n"
            "  hint: labels in the batch for a transformers model, else initialize(loss_fn=...)"
        )
    return loss


def on_device(name: str, value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """An entry of a batch where the model takes it, floating-point tensors in ``dtype``.

    Raises ValueError for what no model is called with.
    """
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name!r} in a batch is a {type(value).__name__}, not a tensor or a number")
