"""Chooses cuts so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..collectives import pretended
from ..tracing.examples import tensors_of
from .pipeline import Pipeline
from .split import SplitError
from .stages import holdings_of, subtree
from .wiring import Instance, Wiring

Measure = Literal["parameters", "flops", "time"]
MEASURES = ("parameters", "flops", "time")
# Timed runs of a segment; the fastest counts, as others ran beside the slower ones.
_RUNS = 3


def choose_cuts(
    model: nn.Module, stages: int, by: Measure, inputs: Mapping[str, Any], device: torch.device
) -> list[str]:
    """The paths of modules after which to cut: of those in lists of modules, the ones that balance the stages best.

    ``by``: parameters; FLOPs of the forward pass for ``inputs``; or the seconds that forward and backward take on
    ``device`` here, with random weights, one segment at a time. Raises SplitError where there are too few places.
    """
    candidates = _candidates(model)
    if len(candidates) < stages - 1:
        raise SplitError(
            f"{len(candidates)} places to cut are known (modules in lists of modules), and {stages} stages need "
            f"{stages - 1}",
            "cut_pipeline_stage() where you want the cuts",
        )
    pipeline = Pipeline(model, candidates)
    wiring = pipeline.wiring(inputs, training=True)
    costs = _MEASURES[by](pipeline, wiring, inputs, device)
    return [wiring.cuts[i] for i in balance(costs, stages)]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """After which items to cut so that the costliest of ``stages`` runs of neighbours costs least, and, among those
    that do, the sum of squares is least."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: (largest, sum of squares, cuts) of the first ``end`` items in the runs so far
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for run in range(stages):
        new: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(run + 1, len(costs) - (stages - run - 1) + 1):
            options = [
                (max(largest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, [*cuts, end - 1])
                for start, (largest, squares, cuts) in best.items()
                if start < end
            ]
            new[end] = min(options)
        best = new
    return best[len(costs)][2][:-1]


def _candidates(model: nn.Module) -> list[str]:
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path == cut or path.startswith(f"{cut}.") for cut in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
            if len(children) > 1:
                found += [f"{path}.{name}".lstrip(".") for name in children]
    return found


def _parameters(pipeline: Pipeline, wiring: Wiring, inputs: Any, device: torch.device) -> list[float]:
    model = pipeline.skeleton
    return [sum(p.numel() for p in subtree(model, held).parameters()) for held in holdings_of(pipeline, model)]


def _flops(pipeline: Pipeline, wiring: Wiring, inputs: Mapping[str, Any], device: torch.device) -> list[float]:
    def count(instance: Instance, segment: int, received: list[Tensor], values: dict[str, Tensor]) -> float:
        with FlopCounterMode(display=False) as counter, pretended():
            instance.run(segment, pipeline.skeleton, received, values, torch.device("meta"))
        return float(counter.get_total_flops())

    return _each(pipeline, wiring, inputs, torch.device("meta"), count)


def _seconds(pipeline: Pipeline, wiring: Wiring, inputs: Mapping[str, Any], device: torch.device) -> list[float]:
    model = pipeline.skeleton
    held = holdings_of(pipeline, model)

    def measure(instance: Instance, segment: int, received: list[Tensor], values: dict[str, Tensor]) -> float:
        module = _with_weights(subtree(model, held[segment]), device)
        return min(_seconds_of(instance, segment, module, received, values, device) for _ in range(_RUNS))

    return _each(pipeline, wiring, inputs, device, measure)


def _each(
    pipeline: Pipeline, wiring: Wiring, inputs: Mapping[str, Any], device: torch.device,
    measure: Callable[[Instance, int, list[Tensor], dict[str, Tensor]], float],
) -> list[float]:  # fmt: skip
    """``measure`` of each segment, with inputs of the right look on ``device``."""
    looks = wiring.values(pipeline.skeleton, tensors_of(inputs, pipeline.skeleton))
    instance = wiring.at(looks)
    values = {name: _made(tuple(look.shape), look.dtype, device) for name, look in looks.items()}
    found = []
    for segment, part in enumerate(wiring.parts):
        received = [
            _made(instance.shape(value), value.dtype, device).requires_grad_(value.requires_grad)
            for value in part.received
        ]
        found.append(measure(instance, segment, received, values))
    return found


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Ones are ids, labels and masks that every model takes.
    return torch.rand(shape, dtype=dtype, device=device) if dtype.is_floating_point else torch.ones(
        shape, dtype=dtype, device=device
    )  # fmt: skip


def _with_weights(module: nn.Module, device: torch.device) -> nn.Module:
    made = copy.deepcopy(module).to_empty(device=device)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.zero_()
    return made


def _seconds_of(
    instance: Instance, segment: int, module: nn.Module, received: list[Tensor], values: dict[str, Tensor],
    device: torch.device,
) -> float:  # fmt: skip
    _wait(device)
    start = time.perf_counter()
    results = instance.run(segment, module, received, values, device)
    tensors = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(x) for x in tensors])
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


_MEASURES: dict[str, Callable[[Pipeline, Wiring, Any, torch.device], list[float]]] = {
    "parameters": _parameters,
    "flops": _flops,
    "time": _seconds,
}
