"""All stages of a model one after the other in one process: what they compute together, without a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..scheduled import ScheduledModel


def run_in_order(scheduled: ScheduledModel, /, **batch: Any) -> Any:
    """The model's output for ``batch`` (arguments of its forward by name), computed stage by stage.

    For a model that was built on a mesh of pp=1, where every stage is at hand. In training a model that gives a loss
    gives nothing else. Raises ValueError on another mesh, GuardError for a batch that cannot be split.
    """
    pipeline = scheduled.pipeline
    if pipeline is None or scheduled.mesh.pp > 1:
        raise ValueError(f"this model has {len(scheduled.stages)} stages on pp={scheduled.mesh.pp} ranks, not all here")
    wiring = pipeline.wiring(batch, scheduled.model.training)
    values = wiring.values(pipeline.skeleton, batch)
    instance = wiring.at(values)
    device = next((parameter.device for parameter in scheduled.model.parameters()), torch.device("cpu"))
    passed: Any = []
    for stage in scheduled.stages:
        assert stage.module is not None
        passed = instance.run(stage.index, stage.module, passed, values, device)
    return passed
