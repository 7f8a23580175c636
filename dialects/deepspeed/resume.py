"""``load_checkpoint`` at other parallel sizes than those at which the checkpoint was saved."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor, nn

from partbook.core import PartbookError, ScheduledModel, WeightsError

from .groups import for_groups_here, names_of_groups
from .manifest import Manifest, manifest_of, optimizer_order
from .saved import WEIGHT, Saved, _load

# What DeepSpeed itself keeps in the file of the engine (runtime/engine.py, 0.19); the rest is the user's.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "optimizer_state_dict",
}  # fmt: skip


def resume_at_any_size(engine: Any, scheduled: ScheduledModel) -> None:
    """Have the engine save what its files are made of, and load them at any tp, pp and dp."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = str(tag if tag is not None else f"global_step{engine.global_steps}")
        manifest = manifest_of(engine, scheduled)
        if dist.get_rank() == 0:
            # Before the files that it describes: without all of them the checkpoint is refused.
            manifest.write(Path(save_dir, name))
        return save(save_dir, name, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = _folder(load_dir, tag)
        manifest = None if folder is None else Manifest.read(folder)
        if folder is None or manifest is None or manifest.content() == manifest_of(engine, scheduled).content():
            return load(load_dir, tag, *args, **kwargs)
        return _load_other_size(engine, scheduled, folder, manifest, *args, **kwargs)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _folder(load_dir: str, tag: Any) -> Path | None:
    """The folder of the tag, of the latest without one; None where there is none, which DeepSpeed says itself."""
    if tag is None:
        latest = Path(load_dir, "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    return Path(load_dir, str(tag))


def _load_other_size(
    engine: Any, scheduled: ScheduledModel, folder: Path, manifest: Manifest, load_module_strict: bool = True,
    load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Weights, optimizer states, counters. Raises, before anything changes, where the checkpoint does not fit."""
    _check(engine, scheduled, folder, manifest)
    if custom_load_fn is not None:
        raise ValueError("custom_load_fn cannot be combined with other parallel sizes than the checkpoint's")
    saved = Saved(folder, manifest)
    loads_states = load_optimizer_states and not load_module_only
    if loads_states:
        _make_states(engine, scheduled, saved, _settings_of_groups(engine, scheduled, saved))
    for name, parameter in scheduled.model.named_parameters():
        _fill(engine, scheduled, saved, name, parameter, loads_states)
    _fill_buffers(scheduled, saved)
    state = saved.engine_state
    if not load_module_only:
        _restore_engine(engine, state, load_lr_scheduler_states)
    _load.cache_clear()
    dist.barrier()
    return str(folder), {key: value for key, value in state.items() if key not in _OWN}


def _check(engine: Any, scheduled: ScheduledModel, folder: Path, manifest: Manifest) -> None:
    sizes = f"dp={manifest.mesh.dp} pp={manifest.mesh.pp} tp={manifest.mesh.tp}"
    if manifest.zero > 2 or engine.zero_optimization_stage() > 2:
        raise PartbookError(
            f"the checkpoint {str(folder)!r} was saved at {sizes} with ZeRO stage {manifest.zero}, and at another size "
            f"or stage (here {engine.zero_optimization_stage()}) only stages 0 to 2 can be loaded\n"
            "  hint: load it at the size at which it was saved, or start from save_pretrained's folder"
        )
    known, wanted = manifest.shapes, scheduled.original.shapes
    names = sorted(
        n for n in {*known, *wanted} if known.get(n) != wanted.get(n) and n not in scheduled.original.buffers
    )
    if names:
        name = names[0]
        raise WeightsError(
            f"the checkpoint {str(folder)!r} is of another model: {name!r} is {known.get(name, 'absent')} there and "
            f"{wanted.get(name, 'absent')} here ({len(names)} such names)"
        )


class _Source:
    """One kind of tensor of the checkpoint, read as weights are: some rows of an original parameter."""

    def __init__(self, saved: Saved, key: str) -> None:
        self._saved, self._key = saved, key

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        full = self._saved.full(name, self._key)
        return full.narrow(axis, start, stop - start) if full.dim() else full


def _local(scheduled: ScheduledModel, saved: Saved, name: str, key: str) -> Tensor:
    """This rank's part of a parameter or of one of its states."""
    expression, layout = scheduled.weights[name], scheduled.layouts.get(name)
    shapes, full = scheduled.original.shapes, scheduled.full_shape(name)
    ranges = layout.ranges(scheduled.mesh.tp_rank) if layout else [(0, full[0] if full else 1)]
    axis = layout.axis if layout else 0
    source = _Source(saved, key)
    pieces = [expression.read(source.read, shapes, axis, start, stop) for start, stop in ranges]
    return layout.assemble(pieces) if layout else pieces[0]


def _keys(scheduled: ScheduledModel, saved: Saved, name: str) -> list[str]:
    return saved.states(next(scheduled.weights[name].names()))


def _fill(
    engine: Any, scheduled: ScheduledModel, saved: Saved, name: str, parameter: nn.Parameter, loads_states: bool
) -> None:
    weight = _local(scheduled, saved, name, WEIGHT).to(parameter.device)
    with torch.no_grad():
        parameter.copy_(weight)
    is_flat = hasattr(parameter, "_hp_mapping")
    if is_flat:
        safe_set_full_fp32_param(parameter, weight.float())
    if not loads_states or not parameter.requires_grad:
        return
    for key in _keys(scheduled, saved, name):
        value = _local(scheduled, saved, name, key).to(parameter.device)
        if is_flat:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            engine.optimizer.state[parameter][key] = value.to(parameter.dtype).clone()


def _settings_of_groups(engine: Any, scheduled: ScheduledModel, saved: Saved) -> list[Mapping[str, Any]]:
    """For each group of the optimizer the settings that its parameters had. Raises WeightsError where these differ."""
    found: list[Mapping[str, Any]] = []
    for names in names_of_groups(engine, scheduled):
        known = [(name, saved.settings(next(scheduled.weights[name].names()))) for name in names]
        of_group = [(name, {k: v for k, v in one.items() if k != "params"}) for name, one in known if one]
        for name, settings in of_group[1:]:
            if settings != of_group[0][1]:
                raise WeightsError(
                    f"{of_group[0][0]!r} and {name!r} are in one parameter group here, and were in two of the "
                    f"checkpoint, with other settings: {of_group[0][1]} and {settings}\n"
                    "  hint: group them as they were"
                )
        found.append(of_group[0][1] if of_group else {})
    return found


def _make_states(engine: Any, scheduled: ScheduledModel, saved: Saved, settings: Iterable[Mapping[str, Any]]) -> None:
    """Give an optimizer that has not made a step its states, and all the saved scalars and settings."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    names = {key for name in scheduled.weights for key in _keys(scheduled, saved, name)}
    held = optimizer_order(engine, scheduled)
    for parameter in _parameters(optimizer):
        state = optimizer.state[parameter]
        state.update({key: _copy(value) for key, value in saved.scalars.items()} if names else {})
        if not held:
            state.update({key: torch.zeros_like(parameter, requires_grad=False) for key in names})
    if not held and names:
        # The states of the parts of a flat tensor become known to its parameters.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for group, known in zip(optimizer.param_groups, settings, strict=True):
        group.update(known)
    for key in ("loss_scaler", "dynamic_loss_scale"):
        if engine.fp16_enabled() and key in saved.optimizer_state:
            setattr(engine.optimizer, key, saved.optimizer_state[key])


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _fill_buffers(scheduled: ScheduledModel, saved: Saved) -> None:
    present = dict(scheduled.model.named_buffers())
    for name, tensor in saved.buffers().items():
        if name in present:
            present[name].copy_(tensor)


def _restore_engine(engine: Any, state: dict[str, Any], with_scheduler: bool) -> None:
    engine.global_steps, engine.skipped_steps = state["global_steps"], state["skipped_steps"]
    engine.global_samples = state.get("global_samples", engine.global_steps * engine.train_batch_size())
    if with_scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        own, groups = engine.lr_scheduler.state_dict(), engine.optimizer.param_groups
        engine.lr_scheduler.load_state_dict(for_groups_here(state["lr_scheduler"], own, groups))
