"""Full original tensors out of the files of a DeepSpeed checkpoint, whatever the sizes that it was saved at."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partbook.core import PartbookError

from .manifest import Manifest

# the key of the parameter itself, beside those of its optimizer states
WEIGHT = "fp32"


class Saved:
    """The tensors of one checkpoint: of each original parameter its weight (``WEIGHT``) and optimizer states.

    Files are mapped into memory; a tensor is read when it is asked for, and the last one is kept. Raises PartbookError
    for a file that is missing.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        mesh = manifest.mesh
        self._check_files()
        # original name -> where it is held first: (pipeline rank, present name)
        self._places: dict[str, tuple[int, str]] = {}
        for pp_rank, held in enumerate(manifest.held):
            for name, one in held.items():
                for original in one.made_of.names():
                    self._places.setdefault(original, (pp_rank, name))
        self._model_ranks = mesh.pp * mesh.tp
        self._made: tuple[tuple[int, str, str], dict[str, Tensor]] | None = None

    def states(self, original: str) -> list[str]:
        """The keys of the optimizer's tensors for a parameter; none where it has made no step."""
        pp_rank, name = self._places[original]
        return [key for key in self._local(pp_rank * self.manifest.mesh.tp).get(name, {}) if key != WEIGHT]

    def full(self, original: str, key: str) -> Tensor:
        """The full tensor of an original parameter."""
        pp_rank, name = self._places[original]
        if self._made is None or self._made[0] != (pp_rank, name, key):
            held, tp = self.manifest.held[pp_rank][name], self.manifest.mesh.tp
            parts = [_joined(self._local(pp_rank * tp + tp_rank)[name][key]) for tp_rank in range(tp)]
            if held.layout is not None:
                parts = [part.reshape(held.layout.local_shape()) for part in parts]
                whole = held.layout.merge(parts)
            else:
                whole = parts[0].reshape(held.made_of.shape(self.manifest.shapes))
            self._made = (pp_rank, name, key), dict(held.made_of.invert(whole, self.manifest.shapes))
        return self._made[1][original]

    def buffers(self) -> dict[str, Tensor]:
        """Every saved tensor of a module that is no parameter, by its name in the model."""
        found: dict[str, Tensor] = {}
        for pp_rank, held in enumerate(self.manifest.held):
            module = self._module(pp_rank * self.manifest.mesh.tp)
            found |= {name: tensor for name, tensor in module.items() if name not in held}
        return found

    @functools.cached_property
    def engine_state(self) -> dict[str, Any]:
        """What DeepSpeed saves of the engine: counters, learning-rate schedule, the user's own."""
        return _load(self._model_file(0))

    @functools.cached_property
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's own state dict, of the first rank: groups and scalars are the same on all."""
        files = self._zero_files(0)
        return _load(files[0])["optimizer_state_dict"] if files else {"base_optimizer_state": self._torch_state(0)}

    @functools.cached_property
    def scalars(self) -> dict[str, Any]:
        """The optimizer's states that are no tensors of a parameter's size, such as the number of steps."""
        state = self.optimizer_state["base_optimizer_state"]["state"]
        first: dict[str, Any] = next(iter(state.values()), {})
        return {key: value for key, value in first.items() if not (isinstance(value, Tensor) and value.dim())}

    def settings(self, original: str) -> Mapping[str, Any]:
        """Those of the optimizer's group in which a parameter was, its learning rate and such; {} for a frozen one."""
        pp_rank, name = self._places[original]
        return self._settings(pp_rank * self.manifest.mesh.tp).get(name, {})

    # ------------------------------------------------------------------ files

    def _check_files(self) -> None:
        mesh = self.manifest.mesh
        wanted = [self._model_file(rank) for rank in range(mesh.pp * mesh.tp)]
        missing = [str(file.name) for file in wanted if not file.is_file()]
        for rank in range(mesh.pp * mesh.tp):
            files = self._zero_files(rank)
            if (files or self.manifest.zero) and len(files) != mesh.dp:
                missing.append(f"{mesh.dp - len(files)} optimizer files of model rank {rank}")
        if missing:
            raise PartbookError(
                f"the checkpoint {str(self.folder)!r} is not complete: it lacks {', '.join(missing)}\n"
                "  hint: a save that was interrupted; load an earlier tag"
            )

    def _model_file(self, rank: int) -> Path:
        return self.folder / f"mp_rank_{rank:02d}_model_states.pt"

    def _zero_files(self, rank: int) -> list[Path]:
        """One for each dp rank, in order."""
        dp = self.manifest.mesh.dp
        names = (
            [f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}_optim_states.pt" for prefix in ("", "bf16_", "fp16_")]
            for dp_rank in range(dp)
        )
        found = (next((self.folder / name for name in each if (self.folder / name).is_file()), None) for each in names)
        return [file for file in found if file is not None]

    def _module(self, rank: int) -> Mapping[str, Tensor]:
        mesh = self.manifest.mesh
        if mesh.pp == 1:
            return _load(self._model_file(rank))["module"]
        stage, tp_rank = divmod(rank, mesh.tp)
        split = f"-model_{tp_rank:02d}" if mesh.tp > 1 else ""
        return _load(self.folder / f"layer_{stage:02d}{split}-model_states.pt")

    def _torch_state(self, rank: int) -> dict[str, Any]:
        return _load(self._model_file(rank))["optimizer"]

    @functools.cache  # noqa: B019  (mapped files, for as long as this is read)
    def _local(self, rank: int) -> dict[str, dict[str, list[Tensor]]]:
        """By name the tensors of one model rank, in the pieces that the dp ranks have of them."""
        files = self._zero_files(rank)
        if not files:
            return self._of_whole(rank)
        # A frozen parameter is in no partition.
        return {name: {WEIGHT: [tensor]} for name, tensor in self._module(rank).items()} | self._of_partitions(files)

    @functools.cache  # noqa: B019
    def _settings(self, rank: int) -> dict[str, Mapping[str, Any]]:
        files = self._zero_files(rank)
        if not files:
            order = self.manifest.order[rank]
            return {order[i]: group for group in self._torch_state(rank)["param_groups"] for i in group["params"]}
        states = [_load(file)["optimizer_state_dict"] for file in files]
        groups = states[0]["base_optimizer_state"]["param_groups"]
        return {
            self._present(name): group
            for state in states
            for group, mapping in zip(groups, state["param_slice_mappings"], strict=True)
            for name in mapping
        }

    def _of_whole(self, rank: int) -> dict[str, dict[str, list[Tensor]]]:
        found = {name: {WEIGHT: [tensor]} for name, tensor in self._module(rank).items()}
        state = self._torch_state(rank)["state"]
        for index, name in enumerate(self.manifest.order[rank]):
            for key, value in state.get(index, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    found[name][key] = [value]
        return found

    def _of_partitions(self, files: list[Path]) -> dict[str, dict[str, list[Tensor]]]:
        pieces: dict[str, dict[str, list[Tensor]]] = {}
        for file in files:
            saved = _load(file)["optimizer_state_dict"]
            states = saved["base_optimizer_state"]["state"]
            for group, mapping in enumerate(saved["param_slice_mappings"]):
                flat = {WEIGHT: saved["single_partition_of_fp32_groups"][group]}
                flat |= {k: v for k, v in states.get(group, {}).items() if isinstance(v, Tensor) and v.dim()}
                for name, place in mapping.items():
                    for key, tensor in flat.items():
                        piece = tensor.narrow(0, place.start, place.numel)
                        pieces.setdefault(self._present(name), {}).setdefault(key, []).append(piece)
        return pieces

    def _present(self, name: str) -> str:
        # In a pipeline the number of the layer comes first.
        return name if self.manifest.mesh.pp == 1 else name.partition(".")[2]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@functools.cache
def _load(file: Path) -> Any:
    if not file.is_file():
        raise PartbookError(f"the checkpoint lacks {file.name}")
    # What DeepSpeed pickles into it are objects of its own.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
