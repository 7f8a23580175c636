"""What the primitives applied so far have established; shared by all nodes of one schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .layout import Layout
from .mesh import Mesh
from .tracing.library import Library
from .weights import Expression, Source

if TYPE_CHECKING:
    from .history import History
    from .primitives.sync import Sync


@dataclass(frozen=True)
class Original:
    """The model as the user brought it: names, shapes, ties, and a copy of its structure on the meta device."""

    skeleton: nn.Module
    keys: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    # every name of a tied tensor -> the first of them in model order
    ties: Mapping[str, str]
    buffers: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module) -> Original:
        first: dict[int, str] = {}
        ties = {}
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in named.items():
            if first.setdefault(id(tensor), name) != name:
                ties[name] = first[id(tensor)]
        return Original(
            skeleton=skeleton_of(model),
            keys=tuple(model.state_dict()),
            shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
            ties=ties,
            buffers=tuple(name for name, _ in model.named_buffers()),
        )


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on the meta device, ties kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    for module in model.modules():
        for value in vars(module).values():
            # A single number goes with tensors of any device, and its value may be asked for.
            if isinstance(value, Tensor) and value.dim():
                memo[id(value)] = value.detach().to("meta")
    return copy.deepcopy(model, memo)


@dataclass
class State:
    """The model in its present form, with a record of how it differs from the original."""

    model: nn.Module
    mesh: Mesh
    original: Original
    history: History
    weights: dict[str, Expression]
    layouts: dict[str, Layout] = field(default_factory=dict)
    syncs: dict[str, list[Sync]] = field(default_factory=dict)
    annotations: dict[str, dict[str, Any]] = field(default_factory=dict)
    # paths of the heads whose loss is computed on vocabulary shards
    sharded_losses: list[str] = field(default_factory=list)
    # paths of the modules after which a pipeline stage ends
    cuts: list[str] = field(default_factory=list)
    # of the whole model, by name; None: those that are known for its class
    example_inputs: Mapping[str, Any] | None = None
    # the one output that a runtime needs of a cut model, see Pipeline
    only_output: str | None = None
    # its pipeline, and what it was made for
    pipeline: tuple[Any, Any] | None = None
    library: Library = field(default_factory=Library)
    _names: dict[int, str] | None = None
    _owners: dict[int, list[tuple[nn.Module, str, str]]] | None = None

    @staticmethod
    def of(model: nn.Module, mesh: Mesh, history: History) -> State:
        weights: dict[str, Expression] = {name: Source(name) for name, _ in model.named_parameters()}
        return State(model, mesh, Original.of(model), history, weights)

    def canonical(self, parameter: Tensor | None) -> str:
        """The first name, in model order, of a parameter of the model."""
        if self._names is None:
            self._names = {id(value): name for name, value in self.model.named_parameters()}
        return self._names[id(parameter)]

    def structure_changed(self) -> None:
        """To be called after parameters were added, removed or exchanged."""
        self._names = self._owners = None

    def owners(self, parameter: Tensor) -> Iterator[tuple[nn.Module, str, str]]:
        """(module, its path, the parameter's name in it) for every module that holds ``parameter``."""
        if self._owners is None:
            # Kept, because every shard asks: a walk over the model each time is quadratic in its layers.
            self._owners = {}
            for path, module in self.model.named_modules():
                for name, value in module._parameters.items():
                    self._owners.setdefault(id(value), []).append((module, path, name))
        yield from self._owners.get(id(parameter), ())

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The unsharded, unpadded shape of the current parameter ``name``."""
        return self.weights[name].shape(self.original.shapes)


def evaluate(expression: Expression, tensors: Mapping[str, Tensor]) -> Tensor:
    """The full tensor that ``expression`` makes out of ``tensors``, on whatever device they are."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(name: str, axis: int, start: int, stop: int) -> Tensor:
        return tensors[name].narrow(axis, start, stop - start)

    shape = expression.shape(shapes)
    with torch.no_grad():
        if not shape:
            return tensors[next(expression.names())]
        return expression.read(read, shapes, 0, 0, shape[0])
