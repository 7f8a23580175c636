"""The record of a schedule: a refused call leaves all of it alone, and a saved history makes the same model again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partbook.core import History, Schedule, ScheduleError
from partbook.core.execution import plan_of


def content(model: nn.Module) -> dict[str, Any]:
    """Everything that a primitive may change in a model, comparable with ``==`` between two models of one structure."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {
        "ties": [first.setdefault(id(tensor), name) for name, tensor in tensors],
        "tensors": {name: (tuple(t.shape), t.dtype, t.requires_grad, _bytes(t), _bytes(t.grad)) for name, t in tensors},
        "classes": {path: type(module).__qualname__ for path, module in model.named_modules()},
        "attributes": {path: _plain(module) for path, module in model.named_modules()},
        "hooks": {path: [*module._forward_hooks, *module._forward_pre_hooks] for path, module in model.named_modules()},
    }


def identities(model: nn.Module) -> dict[str, Any]:
    """The objects themselves: a module's class, plan and parameters are the same ones, not equal ones."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found |= {f"module {path}": module, f"class {path}": type(module), f"plan {path}": plan_of(module)}
        found |= {f"tensor {path}.{name}": t for name, t in {**module._parameters, **module._buffers}.items()}
    return found


def record(sch: Schedule) -> dict[str, Any]:
    """What the schedule knows, and its two texts."""
    state = sch.state
    kept = {name: getattr(state, name) for name in ("weights", "layouts", "annotations", "sharded_losses")}
    syncs = {path: list(syncs) for path, syncs in state.syncs.items()}
    return {**kept, "syncs": syncs, "tree": str(sch), "history": [(s.path, s.primitive) for s in sch.history]}


def assert_unchanged(sch: Schedule, call: Callable[[], object]) -> None:
    """``call``, which must raise, leaves model, record and history bit for bit and object for object as they were."""
    root = Schedule(sch.state)
    before, objects, known = content(root.module), identities(root.module), repr(record(root))
    try:
        call()
    finally:
        after = identities(root.module)
        assert after.keys() == objects.keys()
        assert [name for name in objects if after[name] is not objects[name]] == []
        assert content(root.module) == before
        assert repr(record(root)) == known


def assert_refused(sch: Schedule, call: Callable[[Schedule], object], *fragments: str) -> ScheduleError:
    """``call(sch)`` raises a ScheduleError that has the ``fragments`` and the call's own line; nothing changes."""
    with pytest.raises(ScheduleError) as caught:
        assert_unchanged(sch, lambda: call(sch))
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)
    code = call.__code__  # type: ignore[attr-defined]
    lines = {line for _, _, line in code.co_lines()}
    assert caught.value.where in {f"{code.co_filename}:{line}" for line in lines}, caught.value.where
    return caught.value


def assert_replays(sch: Schedule, fresh: nn.Module) -> None:
    """The history as JSON, read back and replayed on ``fresh``, an untouched copy: same model, tree and history."""
    text = sch.history.to_json()
    history = History.from_json(text)
    assert history == sch.history
    assert history.to_json() == text
    again = history.replay(fresh, sch.mesh)
    assert repr(record(again)) == repr(record(sch))
    assert content(fresh) == content(sch.module)
    assert {k: v.shape for k, v in fresh.state_dict().items()} == {
        k: v.shape for k, v in sch.module.state_dict().items()
    }


def _bytes(tensor: Tensor | None) -> bytes | None:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers, names and the like, and the kind of everything else that it keeps."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    plain = bool | int | float | str | tuple | None
    return {name: value if isinstance(value, plain) else type(value).__qualname__ for name, value in own.items()}
