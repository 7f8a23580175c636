"""Megatron's process groups as a mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from partbook.core import Mesh

from .config import ConfigError


def find_groups(given: Any = None) -> Any:
    """The ProcessGroupCollection that was given, or ``parallel_state``'s. Raises ConfigError where there is none."""
    if given is not None:
        return given
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError("Megatron has no process groups yet: call parallel_state.initialize_model_parallel first")
    return ProcessGroupCollection.use_mpu_process_groups()


def mesh_of(groups: Any) -> Mesh:
    """The mesh of Megatron's groups. Raises ConfigError for an order of ranks that is not tp, dp, pp."""
    for axis, name in (("cp", "context"), ("ep", "expert")):
        group = getattr(groups, axis, None)
        if group is not None and group.size() > 1:
            raise ConfigError(
                f"{name} parallelism over {group.size()} ranks: there is no rule for it; start with a size of 1"
            )
    mesh = Mesh(
        dp=groups.dp.size(),
        pp=groups.pp.size(),
        tp=groups.tp.size(),
        rank=dist.get_rank(),
        tp_group=groups.tp,
        dp_group=groups.dp,
        pp_group=groups.pp,
        model_group=groups.mp,
    )
    places = (groups.tp.rank(), groups.dp.rank(), groups.pp.rank())
    if places != (mesh.tp_rank, mesh.dp_rank, mesh.pp_rank):
        raise ConfigError(
            f"rank {mesh.rank} is (tp, dp, pp) = {places} in Megatron, and {mesh.tp_rank, mesh.dp_rank, mesh.pp_rank} "
            "where tp ranks are neighbours, then dp, then pp: initialize_model_parallel(order='tp-cp-ep-dp-pp')"
        )
    return mesh
