"""This rank's stage as a PipelineModule, and the parameters that several stages hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import Tensor, nn

from partbook.core import Mesh, ScheduledModel
from partbook.core.pipeline import share

from .feed import Feed


class StageLayer(nn.Module):
    """The one layer of a rank: it computes the micro-batch of the number that it is given.

    Its modules and parameters are those of the stage, under the same names, so that a checkpoint has the model's keys.
    """

    def __init__(self, stage: nn.Module, feed: Feed) -> None:
        super().__init__()
        share(self, stage)
        self.feed = feed

    def forward(self, number: Tensor) -> Any:
        return self.feed.run(int(number), self)


class StageModule(PipelineModule):
    """A PipelineModule of one layer a rank.

    Parameters that several stages hold are tied without TiedLayerSpec: DeepSpeed sums the gradients of what
    ``get_tied_weights_and_groups`` names, and counts a parameter that is ``ds_pipe_replicated`` elsewhere
    (runtime/pipe/module.py, 0.19).
    """

    def __init__(self, scheduled: ScheduledModel, feed: Feed) -> None:
        mesh = scheduled.mesh
        self.__dict__["_scheduled"] = scheduled
        self.__dict__["_tied"] = []
        # the engine's, once it has one
        self.__dict__["optimizer"] = None
        layers: list[Any] = [None] * mesh.pp
        layers[mesh.pp_rank] = StageLayer(scheduled.model, feed)
        super().__init__(
            layers, topology=_topology(mesh), loss_fn=feed.loss_of, partition_method="uniform", dynamic_shape=True
        )

    def _index_tied_modules(self) -> dict[str, Any]:
        """Make the groups of the ties, on every rank in the same order."""
        scheduled: ScheduledModel = self._scheduled
        mesh = scheduled.mesh
        for tie in scheduled.ties_across:
            for dp_rank in range(mesh.dp):
                for tp_rank in range(mesh.tp):
                    ranks = [(stage * mesh.dp + dp_rank) * mesh.tp + tp_rank for stage in tie.ranks]
                    group = dist.new_group(ranks)
                    if mesh.rank in ranks:
                        parameter = scheduled.model.get_parameter(tie.names[mesh.pp_rank])
                        parameter.ds_pipe_replicated = mesh.rank != ranks[0]  # type: ignore[attr-defined]
                        self._tied.append((parameter, group, ranks[0]))
        return {}

    def get_tied_weights_and_groups(self) -> list[Any]:
        return [(_Gradient(parameter, self.optimizer), group) for parameter, group, _ in self._tied]

    def _synchronize_tied_weights(self) -> None:
        for parameter, group, first in self._tied:
            dist.broadcast(parameter.detach(), src=first, group=group)


class _Gradient:
    """Where the gradient of a tied parameter is: with fp32 accumulation of 16-bit gradients not in ``.grad``."""

    def __init__(self, parameter: nn.Parameter, optimizer: Any) -> None:
        self._parameter, self._optimizer = parameter, optimizer

    @property
    def grad(self) -> Tensor | None:
        parameter, name, dtype = self._parameter, "grad", self._parameter.dtype
        if getattr(self._optimizer, "use_grad_accum_attribute", False):
            name, dtype = "grad_accum", self._optimizer.gradient_accumulation_dtype
        if getattr(parameter, name) is None and parameter.requires_grad:
            # The other owners of the parameter wait for this one's.
            setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
        found: Tensor | None = getattr(parameter, name)
        return found

    @property
    def _hp_grad(self) -> Tensor | None:
        return getattr(self._parameter, "_hp_grad", None)


def _topology(mesh: Mesh) -> Any:
    if mesh.tp == 1:
        return PipeDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp)
    return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp)
