"""One kind of batch over all stages: what each receives, reads and sends, and running it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import GuardError
from ..loss import loss_follows
from ..tracing.code import compile_graph
from ..tracing.isolation import ModesKept
from ..tracing.kind import arranger_of
from ..tracing.symbols import expression
from ..tracing.traced import Kind
from .split import Part, Value

# Shapes that were met last: a loader gives the same ones again, or ever new ones.
_REMEMBERED = 256


@dataclass
class Wiring:
    """The parts that the stages do with one kind of batch.

    ``cuts`` are in the order in which they are reached. ``takes_gradient``: it was made with gradients enabled.
    ``loss_follows``: a sharded loss is computed of the logits.
    """

    kind: Kind
    cuts: tuple[str, ...]
    parts: tuple[Part, ...]
    symbols: Mapping[Any, tuple[str, int]]
    takes_gradient: bool
    loss_follows: bool
    _functions: dict[int, Any] = field(default_factory=dict)
    _instances: dict[tuple[int, ...], Instance] = field(default_factory=dict)

    def accepts(self, model: nn.Module, batch: Mapping[str, Any]) -> bool:
        if self.takes_gradient is not torch.is_grad_enabled():
            return False
        return isinstance(self._accept(model, batch), tuple)

    def values(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The model's inputs by the names that parts have for them."""
        found = self._accept(model, batch)
        assert isinstance(found, tuple), found
        return dict(zip(self._inputs, found, strict=True))

    def at(self, values: Mapping[str, Tensor]) -> Instance:
        """The wiring for the sizes of one batch."""
        sizes = tuple(values[name].shape[dim] for name, dim in self.symbols.values())
        if sizes not in self._instances:
            if len(self._instances) >= _REMEMBERED:
                self._instances.pop(next(iter(self._instances)))
            self._instances[sizes] = Instance(self, dict(zip(self.symbols, sizes, strict=True)))
        return self._instances[sizes]

    def function(self, stage: int) -> Any:
        if stage not in self._functions:
            self._functions[stage] = compile_graph(self.parts[stage].graph, f"stage {stage}")
        return self._functions[stage]

    @functools.cached_property
    def _inputs(self) -> list[str]:
        return [node.name for node in self.kind.graph.nodes if node.op == "placeholder" and node.name != "self"]

    def _accept(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, ...] | str:
        arranger = arranger_of(model)
        args, kwargs = arranger.using_none((), _distinct(batch))
        given = arranger(args, kwargs)
        assert given is not None
        return self.kind.accept(model, given)


class Instance:
    """A wiring with numbers for its symbols."""

    def __init__(self, wiring: Wiring, sizes: Mapping[Any, int]) -> None:
        self.wiring = wiring
        self._sizes = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        self._facts: dict[int, list[Any]] = {}
        self._shapes: dict[Value, tuple[int, ...]] = {}

    def shape(self, value: Value) -> tuple[int, ...]:
        if value not in self._shapes:
            self._shapes[value] = tuple(size if isinstance(size, int) else self._number(size) for size in value.shape)
        return self._shapes[value]

    def run(
        self, stage: int, module: nn.Module, received: Sequence[Tensor], values: Mapping[str, Tensor],
        device: torch.device,
    ) -> Any:  # fmt: skip
        """What ``module``, the stage, computes: the list of sent tensors, on the last stage the model's own output."""
        part = self.wiring.parts[stage]
        if stage not in self._facts:
            self._facts[stage] = [None if fact is None else self._number(fact) for fact in part.facts]
        facts = [device if fact is None else fact for fact in self._facts[stage]]
        raw = [values[name] for name in part.raw]
        with ExitStack() as stack:
            if part.has_modes:
                stack.enter_context(ModesKept())
            if self.wiring.loss_follows:
                stack.enter_context(loss_follows())
            results = self.wiring.function(stage)(module, *received, *raw, *facts)
        if part.sent or stage < len(self.wiring.parts) - 1:
            _check_dtypes(stage, part, results)
            return results
        spec = self.wiring.kind.output
        return results[0] if spec.is_leaf() else pytree.tree_unflatten(results, spec)

    def _number(self, size: Any) -> Any:
        number = sympy.sympify(size).xreplace(self._sizes)
        if isinstance(number, sympy.logic.boolalg.BooleanAtom):
            return bool(number)
        return int(number) if number.is_integer else float(number)


def _check_dtypes(stage: int, part: Part, results: Sequence[Tensor]) -> None:
    """A receiver knows the dtypes of the trace, and would take other bytes for numbers of them."""
    for tensor, value in zip(results, part.sent, strict=True):
        if tensor.dtype != value.dtype:
            raise GuardError(
                f"{value.name!r}, which stage {stage} sends, is {tensor.dtype}, and was {value.dtype} when the model "
                "was cut\n  hint: autocast is not seen by the trace, nor is a conversion after it: convert the model "
                "before it is scheduled, or cut where that tensor does not cross"
            )


def _distinct(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with a tensor of its own for each entry: labels may be the ids themselves. None is written to."""
    seen: set[int] = set()

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in seen:
            return value.view_as(value)
        seen.add(id(value))
        return value

    return pytree.tree_map(one, dict(batch))


def symbols_of(kind: Kind, replace: Any) -> dict[Any, tuple[str, int]]:
    """Where the value of each symbol is read: (input, dim)."""
    found: dict[Any, tuple[str, int]] = {}
    for node in kind.graph.nodes:
        if node.op == "placeholder" and "val" in node.meta:
            for dim, size in enumerate(node.meta["val"].shape):
                size = replace(expression(size))
                if size.is_Symbol:
                    found.setdefault(size, (node.name, dim))
    return found
