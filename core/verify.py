"""Numbers: the dense model against the scheduled one, outputs, every gradient, parameters after optimiser steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .consolidate import consolidate, gradients
from .errors import PartbookError
from .loss import causal_lm_loss
from .mesh import Mesh
from .pipeline import run_in_order
from .probe import Probe, first_difference
from .registry import apply_schedule, find_dialect
from .schedule import create_schedule
from .scheduled import ScheduledModel, build
from .spawn import run_ranks

Batch = Mapping[str, Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

# The largest difference over the largest magnitude of the reference, by dtype.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class VerificationError(PartbookError, AssertionError):
    """The scheduled model computes something else than the dense one."""


# of the largest magnitude among all gradients, or all parameters: tensors below it are measured against this
_SMALL = 1e-3


@dataclass(frozen=True)
class Difference:
    """One compared tensor: its largest difference over the largest magnitude of the dense one."""

    what: str
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "" if self.ok else f"  EXCEEDS {self.tolerance:.0e}"
        return f"{self.what} {self.name}: {self.error:.1e}{verdict}"


@dataclass(frozen=True)
class Report:
    """What was compared, and where the two models part first."""

    mesh: Mesh
    differences: tuple[Difference, ...] = field(repr=False)
    first_module: str | None = None

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    def worst(self, what: str) -> Difference:
        """The largest difference among the ``what``: "loss", "output", "gradient", "gradient norm", "parameter"."""
        return max((d for d in self.differences if d.what == what), key=lambda d: d.error)

    def raise_if_failed(self) -> Report:
        if not self.ok:
            raise VerificationError(str(self))
        return self

    def __str__(self) -> str:
        stages = f" pp={self.mesh.pp}" if self.mesh.pp > 1 else ""
        mesh = f"dp={self.mesh.dp}{stages} tp={self.mesh.tp}"
        failed = [difference for difference in self.differences if not difference.ok]
        kinds = dict.fromkeys(difference.what for difference in self.differences)
        lines = [f"{'FAILED' if failed else 'ok'} on {mesh}: {len(self.differences)} comparisons"]
        lines += [f"  worst {self.worst(kind)}" for kind in kinds]
        if self.first_module is not None:
            lines.append(f"  first module that differs: {self.first_module}")
        lines += [f"  {difference}" for difference in failed[:20]]
        return "\n".join(lines + ([f"  and {len(failed) - 20} more"] if len(failed) > 20 else []))


def verify(
    model: nn.Module | Callable[[], nn.Module],
    schedule: Any,
    mesh: Mesh,
    inputs: Batch | Sequence[Batch],
    *,
    schedule_args: Any = None,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    max_norm: float | None = None,
    make_optimizer: MakeOptimizer | None = None,
    timeout: float = 600,
) -> Report:
    """Compare ``model`` with itself under ``schedule`` on a real mesh of ``mesh``'s sizes; the model stays untouched.

    ``inputs``: keyword arguments of one global batch, or one for each step; dp ranks take equal parts of dim 0, and the
    loss is the mean over them, as data-parallel engines have it. Compared are the loss of each of ``steps`` optimiser
    steps, the outputs, every gradient of the first step (through the weight map), the global gradient norm (clipped to
    ``max_norm``), and every parameter after the last step. Dropout is off. With pp > 1 the stages run one after the
    other in one process: each split is checked, no pipeline runtime. Runs in the present world where its size is
    dp * tp, else in processes of its own (gloo; ``model`` and ``schedule`` must be picklable then; ``timeout``:
    seconds).

    The default optimizer is AdamW with eps=1e-5: with the usual 1e-8 the updates of parameters whose gradient is zero
    but for rounding (a key's bias) are rounding noise divided by itself, and no two programs agree on them. In float64
    the loss of a causal language model is computed in float64 on both sides; transformers' own casts logits to float32.
    """
    task = _Task(model, schedule, schedule_args, mesh.at(0), inputs, steps, dtype, tolerance, max_norm, make_optimizer)
    # A boundary between stages changes no number, so one process runs them all, one after the other.
    world = mesh.size // mesh.pp
    here = dist.is_initialized() and dist.get_world_size() == world
    if here or world == 1:
        return _compare(task)
    return run_ranks(_compare, world, task, timeout=timeout)[0]


@dataclass(frozen=True)
class _Task:
    model: nn.Module | Callable[[], nn.Module]
    schedule: Any
    schedule_args: Any
    mesh: Mesh
    inputs: Batch | Sequence[Batch]
    steps: int
    dtype: torch.dtype | None
    tolerance: float | None
    max_norm: float | None
    make_optimizer: MakeOptimizer | None

    def build_model(self) -> nn.Module:
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if self.dtype is not None:
            model = model.to(self.dtype)
        if next(model.parameters()).dtype == torch.float64 and _has_causal_loss(model):
            model.loss_function = causal_lm_loss  # type: ignore[assignment]
        _stop_dropout(model)
        return model.train()

    def batch(self, step: int) -> Batch:
        return self.inputs if isinstance(self.inputs, Mapping) else self.inputs[step % len(self.inputs)]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        make = self.make_optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5))
        return make(model.parameters())


def _compare(task: _Task) -> Report:
    """On every rank: train both models, compare."""
    mesh = find_dialect("pytorch").make_mesh(task.mesh.tp)
    dense = task.build_model()
    model = copy.deepcopy(dense)
    sch = apply_schedule(create_schedule(model, mesh), task.schedule, task.schedule_args)
    if task.mesh.pp > 1 and not sch.state.cuts:
        sch.cut_pipeline_stages(task.mesh.pp)
    scheduled = build(sch)
    run = functools.partial(run_in_order, scheduled) if scheduled.stages else model
    limit = task.tolerance or TOLERANCES[next(dense.parameters()).dtype]
    found: list[Difference] = []
    optimizers = task.optimizer(dense), task.optimizer(model)
    with Probe(dense) as dense_probe, Probe(model) as probe:
        for step in range(task.steps):
            batch = task.batch(step)
            # The rank's own part last, so that the probe holds what its scheduled model must show.
            parts = [_part(batch, mesh, i) for i in range(mesh.dp)]
            reference = _train_dense(dense, parts, mesh.dp_rank)
            output = _train(run, model, parts[mesh.dp_rank], mesh)
            found += _compare_outputs(step, reference, output, limit)
            if step == 0:
                dense_probe.stop()
                probe.stop()
                found += _compare_tensors("gradient", _gradients_of(dense), gradients(scheduled), limit)
            found.append(_compare_norms(step, dense, scheduled, task.max_norm, limit))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    found += _compare_tensors("parameter", dense.state_dict(), consolidate(scheduled), limit)
    model.eval()
    found += _compare_inference(dense, run, _part(task.batch(0), mesh, mesh.dp_rank), limit)
    everywhere = _gather_reports(found, mesh)
    # Looking for the module is collective over the tp group: every rank takes part if any of them failed.
    failed = [difference for difference in everywhere if not difference.ok]
    # One wrong gradient makes every parameter wrong one step later.
    names = [d.name for d in failed if d.what == "gradient"] or [d.name for d in failed]
    where = first_difference(dense_probe, probe, scheduled, limit, names) if failed else None
    return Report(task.mesh, tuple(everywhere), where)


def _train_dense(dense: nn.Module, parts: list[Batch], own: int) -> Any:
    """Backward of the mean loss over the parts; the output for part ``own``."""
    order = [*(i for i in range(len(parts)) if i != own), own]
    for i in order:
        output = dense(**parts[i])
        (_loss_of(output) / len(parts)).backward()
    return output


def _train(run: Callable[..., Any], model: nn.Module, part: Batch, mesh: Mesh) -> Any:
    output = run(**part)
    _loss_of(output).backward()
    if mesh.dp > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(mesh.dp), group=mesh.dp_group)
    return output


def _part(batch: Batch, mesh: Mesh, index: int) -> Batch:
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] % mesh.dp:
            raise ValueError(f"dim 0 of {name} is {value.shape[0]}, which does not divide by dp={mesh.dp}")
    return {
        name: value.chunk(mesh.dp)[index] if isinstance(value, Tensor) and value.ndim else value
        for name, value in batch.items()
    }


def _loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, tuple) else output
    # A model without a loss of its own: any scalar that depends on every element differently.
    return (
        loss
        if loss.ndim == 0
        else (loss * torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view_as(loss)).mean()
    )


def _compare_outputs(step: int, dense: Any, scheduled: Any, limit: float) -> Iterator[Difference]:
    yield Difference("loss", f"of step {step}", error_of(_loss_of(scheduled), _loss_of(dense)), limit)


def _compare_inference(dense: nn.Module, run: Callable[..., Any], batch: Batch, limit: float) -> Iterator[Difference]:
    """Every tensor of the outputs in eval mode, after the last step."""
    with torch.no_grad():
        one, other = dense.eval()(**batch), run(**batch)
    for name, value in _tensors(one).items():
        found = _tensors(other).get(name)
        error = float("inf") if found is None or found.shape != value.shape else error_of(found, value)
        yield Difference("output", name, error, limit)


def _tensors(output: Any) -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {"of the model": output}
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare_tensors(
    what: str, dense: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], limit: float
) -> Iterator[Difference]:
    # What is zero but for rounding (the gradient of a key's bias) is not measured by itself.
    floor = _SMALL * max((float(value.detach().abs().max()) for value in dense.values() if value.numel()), default=0.0)
    for name, value in dense.items():
        found = scheduled.get(name)
        fits = found is not None and found.shape == value.shape
        error = error_of(found, value, floor) if fits and found is not None else float("inf")
        yield Difference(what, name, error, limit)
    for name in scheduled.keys() - dense.keys():
        yield Difference(what, f"{name} (the dense model has none)", float("inf"), limit)


def _compare_norms(
    step: int, dense: nn.Module, scheduled: ScheduledModel, max_norm: float | None, limit: float
) -> Difference:
    bound = float("inf") if max_norm is None else max_norm
    reference = nn.utils.clip_grad_norm_(dense.parameters(), bound)
    norm = find_dialect("pytorch").clip_grad_norm_(scheduled, bound)
    return Difference("gradient norm", f"of step {step}", error_of(norm, reference), limit)


def error_of(found: Tensor, reference: Tensor, floor: float = 1e-30) -> float:
    """The largest difference over the largest magnitude of ``reference``, which counts as ``floor`` at least; infinite
    where either is not finite."""
    found, reference = found.detach().double(), reference.detach().double()
    if not (found.isfinite().all() and reference.isfinite().all()):
        return 0.0 if torch.equal(found, reference) else float("inf")
    if reference.numel() == 0:
        return 0.0
    return float((found - reference).abs().max() / reference.abs().max().clamp_min(max(floor, 1e-30)))


def _gather_reports(found: list[Difference], mesh: Mesh) -> list[Difference]:
    """For each comparison, the worst that any rank saw."""
    if mesh.size == 1:
        return found
    everyone: list[Any] = [None] * mesh.size
    dist.all_gather_object(everyone, found)
    return [max(same, key=lambda difference: difference.error) for same in zip(*everyone, strict=True)]


def _has_causal_loss(model: nn.Module) -> bool:
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _stop_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
