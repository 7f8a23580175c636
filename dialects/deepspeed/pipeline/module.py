"""This rank's stage as a PipelineModule, and the parameters that several stages hold."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import Tensor, nn

from partbook.core import Mesh, ScheduledModel

from .feed import Feed


class StageLayer(nn.Module):
    """The one layer of a rank: it computes the micro-batch of the number that it is given.

    Its modules and parameters are those of the stage, under the same names, so that a checkpoint has the model's keys.
    """

    def __init__(self, stage: nn.Module, feed: Feed) -> None:
        super().__init__()
        # The registries themselves: what is put into the stage later is here too.
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[registry] = stage.__dict__[registry]
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
        os.environ.setdefault("LOCAL_RANK", "0")
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
        return [(_Gradient(parameter), group) for parameter, group, _ in self._tied]

    def _synchronize_tied_weights(self) -> None:
        for parameter, group, first in self._tied:
            dist.broadcast(parameter.detach(), src=first, group=group)


class _Gradient:
    """Where the gradient of a tied parameter is: with fp32 accumulation of 16-bit gradients not in ``.grad``."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        found = self._parameter.grad
        return found if found is not None else getattr(self._parameter, "grad_accum", None)

    @property
    def _hp_grad(self) -> Tensor | None:
        return getattr(self._parameter, "_hp_grad", None)


def _topology(mesh: Mesh) -> Any:
    if mesh.tp == 1:
        return PipeDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp)
    return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp)
