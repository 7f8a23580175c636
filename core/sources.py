"""Where weights come from: a dense model or state dict in memory, a Hugging Face folder, fresh initialisation."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import WeightsError, did_you_mean
from .state import Original


class Source(Protocol):
    """Original tensors by their names in the untouched model."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None where there is no such tensor."""

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of ``axis`` (a 0-d tensor whole)."""

    def describe(self, name: str) -> str:
        """For an error: what was looked for, and what there is."""


def find_source(source: Any, original: Original) -> Source:
    """A dense model or mapping of tensors, the path of a folder or safetensors file, or an int: a seed."""
    if isinstance(source, nn.Module):
        return MemorySource(dict(source.state_dict(keep_vars=True)) | dict(source.named_buffers()), original)
    if isinstance(source, Mapping):
        return MemorySource(source, original)
    if isinstance(source, int) and not isinstance(source, bool):
        return FreshSource(source, original)
    if isinstance(source, str | Path):
        return FolderSource(Path(source), original)
    raise WeightsError(
        f"cannot take weights from a {type(source).__name__}: pass a model, a state dict, a folder, or an int to seed"
        " fresh initialisation"
    )


class MemorySource:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], original: Original) -> None:
        self._tensors, self._original = tensors, original

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._find(name)
        return None if tensor is None or tensor.is_meta else tuple(tensor.shape)

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        tensor = self._find(name)
        assert tensor is not None
        return tensor.detach() if tensor.ndim == 0 else tensor.detach().narrow(axis, start, stop - start)

    def describe(self, name: str) -> str:
        found = self._find(name)
        where = "is on the meta device" if found is not None else f"is missing; {did_you_mean(name, self._tensors)}"
        return f"{name!r} {where}"

    def _find(self, name: str) -> Tensor | None:
        return next((self._tensors[key] for key in names_of(name, self._original) if key in self._tensors), None)


class FolderSource:
    """A Hugging Face folder: ``model.safetensors`` or a sharded index. Only the asked-for slices are read."""

    def __init__(self, folder: Path, original: Original) -> None:
        self._folder, self._original = folder, original
        self._files = _files_of(folder)
        self._open: dict[Path, Any] = {}
        model = original.skeleton
        # Hub checkpoints of a bare model lack the prefix that its head model has (GPT-2: "wte.weight").
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def shape(self, name: str) -> tuple[int, ...] | None:
        key = self._find(name)
        if key is None or key not in self._handle(key).keys():  # noqa: SIM118 (a handle is no dict)
            return None
        return tuple(self._handle(key).get_slice(key).get_shape())

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        key = self._find(name)
        assert key is not None
        handle = self._handle(key)
        part = handle.get_slice(key)
        if not part.get_shape():
            return handle.get_tensor(key)
        return part[(*[slice(None)] * axis, slice(start, stop))]

    def describe(self, name: str) -> str:
        key = self._find(name)
        if key is not None:
            return f"{name!r} is missing in {self._files[key]}, where the index has it"
        return f"{name!r} is missing in {self._folder}; {did_you_mean(name, self._files)}"

    def _find(self, name: str) -> str | None:
        candidates = names_of(name, self._original)
        bare = [key.removeprefix(self._prefix) for key in candidates if key.startswith(self._prefix)]
        return next((key for key in [*candidates, *bare] if key in self._files), None)

    def _handle(self, key: str) -> Any:
        file = self._files[key]
        if file not in self._open:
            self._open[file] = _opened(file)
        return self._open[file]


def _files_of(folder: Path) -> dict[str, Path]:
    """tensor name -> the file that holds it. Raises WeightsError that says what the folder holds instead."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if folder.is_file() and folder.suffix == ".safetensors":
        single = folder
    elif index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise WeightsError(f"{index} names files that are missing: {', '.join(missing)}")
        return files
    if not single.is_file():
        held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "which does not exist"
        raise WeightsError(
            f"{folder} holds neither model.safetensors nor its index, but {held}\n"
            "  hint: save_pretrained of transformers writes safetensors"
        )
    return dict.fromkeys(_opened(single).keys(), single)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error


class FreshSource:
    """The model's own initialisation, one tensor at a time, each from a seed of its own.

    Each tensor is made real alone, in a model on the meta device, and the model's own initialisation runs on the
    modules that lead to it; so it is the same whatever the mesh, and no second full tensor is held.
    """

    def __init__(self, seed: int, original: Original) -> None:
        self._seed, self._original = seed, original
        self._model = copy.deepcopy(original.skeleton)
        self._last: tuple[str, Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._original.shapes.get(name)

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._make(name))
        full = self._last[1]
        return full if full.ndim == 0 else full.narrow(axis, start, stop - start)

    def initialises(self, name: str) -> bool:
        """Whether the model's own code gives ``name`` a value."""
        try:
            self.read(name, 0, 0, 0)
        except WeightsError:
            return False
        return True

    def describe(self, name: str) -> str:
        return f"{name!r} is not initialised by the model's own code"

    def _make(self, name: str) -> Tensor:
        paths = _owner_paths(self._model, name)
        table = self._table(name)
        leaf = name.rpartition(".")[2]
        present = table[leaf]
        assert present is not None
        real = _poison(torch.empty_like(present, device="cpu"))
        table[leaf] = nn.Parameter(real, requires_grad=False) if isinstance(present, nn.Parameter) else real
        try:
            self._initialise(name, paths)
            made = table[leaf].detach()
        finally:
            table[leaf] = present
        if _is_poisoned(made):
            raise WeightsError(
                f"{self.describe(name)} ({type(self._model.get_submodule(paths[0])).__name__} at {paths[0]!r})\n"
                "  hint: pass a folder or a dense model, or build this module off the meta device"
            )
        return made

    def _initialise(self, name: str, paths: list[str]) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed_of(self._seed, name))
            for path in paths:
                module: Any = self._model.get_submodule(path)
                owner = _pretrained_owner(self._model, path)
                if owner is not None:
                    owner._init_weights(module)
                elif path == paths[0] and hasattr(module, "reset_parameters"):
                    module.reset_parameters()

    def _table(self, name: str) -> dict[str, Any]:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        return module._parameters if leaf in module._parameters else module._buffers


def _owner_paths(model: nn.Module, name: str) -> list[str]:
    """The module that owns ``name`` and its ancestors, innermost first: the order in which models initialise."""
    path = name.rpartition(".")[0]
    paths = [path]
    while path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths


def _pretrained_owner(model: nn.Module, path: str) -> Any:
    """The innermost module at or above ``path`` that initialises others (transformers' ``_init_weights``)."""
    while True:
        module = model.get_submodule(path)
        if hasattr(module, "_init_weights"):
            return module
        if not path:
            return None
        path = path.rpartition(".")[0]


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _poison(tensor: Tensor) -> Tensor:
    # What initialisation leaves untouched must not pass for a weight.
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(_INTEGER_POISON)


_INTEGER_POISON = 77


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        # The minimum of what holds a NaN is NaN, and takes no memory.
        return tensor.numel() > 0 and bool(tensor.amin().isnan())
    return tensor.numel() > 0 and bool((tensor == _INTEGER_POISON).all())


def names_of(name: str, original: Original) -> list[str]:
    """Every name of the tensor ``name``, itself first: files keep one name of a tied tensor."""
    first = original.ties.get(name, name)
    return list(dict.fromkeys([name, first, *(key for key, value in original.ties.items() if value == first)]))
