"""The way back: full original tensors out of the ranks' parts, as a state dict or a Hugging Face folder."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .collectives import broadcast_all, gather_parts
from .errors import PartbookError
from .execution import original_class

if TYPE_CHECKING:
    from .mesh import Mesh
    from .scheduled import ScheduledModel

# this rank's tensor of a present parameter; None leaves it out (a parameter without a gradient)
ReadParameter = Callable[[nn.Parameter], Tensor | None]


def consolidate(scheduled: ScheduledModel, read: ReadParameter | None = None) -> dict[str, Tensor]:
    """The original model's state dict, full and exact: same keys, order, shapes and ties, without padding.

    Collective: every rank of a tp group and of a pipeline calls it, and every rank gets it. ``read`` gives this rank's
    tensor of a parameter where it is not the parameter itself; see ``gradients``. A virtual mesh raises RuntimeError.
    """
    full = {name: tensor.clone() for name, tensor in full_tensors(scheduled, read)}
    full |= {name: buffer.clone() for name, buffer in persistent_buffers(scheduled)}
    ties = scheduled.ties
    return {key: full[ties.get(key, key)] for key in scheduled.original.keys if ties.get(key, key) in full}


def gradients(scheduled: ScheduledModel, read: ReadParameter | None = None) -> dict[str, Tensor]:
    """The gradient of every original parameter that has one, full, by its first name. Collective over tp and pp.

    ``read`` gives this rank's gradient of a parameter; by default ``.grad``.
    """
    return {name: tensor.clone() for name, tensor in full_tensors(scheduled, read or (lambda p: p.grad))}


def full_tensors(scheduled: ScheduledModel, read: ReadParameter | None = None) -> Iterator[tuple[str, Tensor]]:
    """(original name, full tensor), one present parameter at a time. Collective over tp and pp."""
    mesh = scheduled.mesh
    if (mesh.is_virtual and scheduled.layouts) or (mesh.pp > 1 and mesh.pp_group is None):
        raise RuntimeError(
            f"a virtual mesh (tp={mesh.tp} pp={mesh.pp}) has this rank's part only; consolidate on a dialect's mesh"
        )
    own = (pair for name, pair in _own_tensors(scheduled, read) if not scheduled.is_copy(name))
    yield from _of_all_stages(mesh, own)


def _of_all_stages(mesh: Mesh, own: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What the ranks of a pipeline have, one after the other, for each of them."""
    if mesh.pp == 1:
        yield from own
        return
    for source in range(mesh.pp):
        yield from broadcast_all(own if source == mesh.pp_rank else None, source, mesh.pp_group)


def _own_tensors(scheduled: ScheduledModel, read: ReadParameter | None) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """(present name, (original name, full tensor)) of this pipeline rank. Collective over tp."""
    mesh, shapes = scheduled.mesh, scheduled.original.shapes
    for name, parameter in scheduled.model.named_parameters():
        local = parameter.detach() if read is None else read(parameter)
        if local is None:
            continue
        layout = scheduled.layouts.get(name)
        if layout is not None and mesh.tp > 1:
            assert mesh.tp_group is not None
            local = layout.merge(gather_parts(local, mesh.tp_group))
        for pair in scheduled.weights[name].invert(local, shapes):
            yield name, pair


def persistent_buffers(scheduled: ScheduledModel) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of those that a state dict has. Collective over pp."""
    present = dict(scheduled.model.named_buffers(remove_duplicate=False))
    own = ((key, present[key].detach()) for key in scheduled.original.keys if key in present)
    yield from _of_all_stages(scheduled.mesh, own)


def save_pretrained(
    scheduled: ScheduledModel,
    folder: str | Path,
    read: ReadParameter | None = None,
    *,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write a Hugging Face folder that plain ``from_pretrained`` loads; full tensors, one name for a tied one.

    Collective: every rank calls it; the mesh's rank 0 writes, holding one file of ``max_shard_size`` bytes at a time.
    Files appear under their names only when all of them are complete.
    """
    tensors = itertools.chain(full_tensors(scheduled, read), persistent_buffers(scheduled))
    if scheduled.mesh.rank == 0:
        _write_folder(scheduled, tensors, Path(folder), max_shard_size)
    else:
        # The other ranks take part in gathering.
        collections.deque(tensors, maxlen=0)


def _write_folder(scheduled: ScheduledModel, tensors: Iterator[tuple[str, Tensor]], folder: Path, limit: int) -> None:
    writer = _ShardWriter(folder, limit)
    try:
        for name, tensor in tensors:
            writer.add(name, tensor)
        _write_configs(scheduled, writer.folder, next(scheduled.model.parameters()).dtype)
        writer.publish()
    finally:
        writer.clean_up()


def guard_save_pretrained(scheduled: ScheduledModel, model: nn.Module) -> None:
    """Keep ``model.save_pretrained`` from writing this rank's slices as if they were the model.

    It takes a full ``state_dict`` (transformers' Trainer passes one) and refuses everything else.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = functools.partial(_save_whole, scheduled)  # type: ignore[assignment]


def _save_whole(
    scheduled: ScheduledModel,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **_: Any,
) -> None:
    given = {name: tuple(tensor.shape) for name, tensor in (state_dict or {}).items()}
    wanted = {name: scheduled.original.shapes[name] for name in scheduled.original.keys}
    # Of a tied tensor one name is enough, the first.
    given = {name: wanted[name] for name in wanted.keys() & scheduled.ties.keys()} | given
    if given != wanted:
        raise PartbookError(
            "model.save_pretrained of a scheduled model would write this rank's slices as if they were the model\n"
            "  hint: save_pretrained of partbook.core (scheduled, folder) or of partbook.dialects.deepspeed "
            "(engine, folder), called on every rank"
        )
    if is_main_process and state_dict is not None:
        first = {name: tensor for name, tensor in state_dict.items() if name not in scheduled.ties}
        _write_folder(scheduled, iter(first.items()), Path(save_directory), 5 * 10**9)


class _ShardWriter:
    """Collects tensors into safetensors files in a hidden folder, which ``publish`` moves to their place."""

    def __init__(self, target: Path, limit: int) -> None:
        target.mkdir(parents=True, exist_ok=True)
        self.target, self.limit = target, limit
        self._temporary = tempfile.TemporaryDirectory(prefix=".partial-", dir=target)
        self.folder = Path(self._temporary.name)
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > self.limit:
            self._flush()
        self._pending[name] = tensor.detach().cpu().clone().contiguous()
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        save_file(self._pending, self.folder / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._bytes = {}, 0

    def publish(self) -> None:
        self._flush()
        count = len(self._files)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        else:
            index = {name: file for file, held in zip(names, self._files, strict=True) for name in held}
            content = {"metadata": {"total_size": self._total}, "weight_map": index}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
        for i, name in enumerate(names):
            os.replace(self.folder / f"{i}.safetensors", self.folder / name)
        for old in [*self.target.glob("model*.safetensors"), self.target / "model.safetensors.index.json"]:
            old.unlink(missing_ok=True)
        for file in sorted(self.folder.iterdir()):
            os.replace(file, self.target / file.name)

    def clean_up(self) -> None:
        self._temporary.cleanup()


def _write_configs(scheduled: ScheduledModel, folder: Path, dtype: torch.dtype) -> None:
    model: Any = scheduled.original.skeleton
    if hasattr(model, "config"):
        config = copy.deepcopy(model.config)
        config.architectures = [original_class(model).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
