"""The mesh over the running world, and what its ranks must agree on before they train: weights and random streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partbook.core import Mesh, rng


def make_mesh(tp: int = 1) -> Mesh:
    """The mesh of the running world: tp groups of neighbouring ranks, dp over what is left.

    Collective: every rank calls it. Without torch.distributed, the mesh of a single process. Raises ValueError when
    tp does not divide the world size.
    """
    if not dist.is_initialized():
        if tp != 1:
            raise ValueError(f"tp={tp} needs torch.distributed: start {tp} processes and init_process_group first")
        return Mesh()
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = Mesh(dp=check_tp(tp, world), tp=tp, rank=rank)
    # Every rank creates every group, in the same order.
    groups = {}
    for axis in ("tp", "dp"):
        for ranks in plan.rank_groups(axis):
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[axis] = group
    return Mesh(dp=plan.dp, tp=tp, rank=rank, tp_group=groups["tp"], dp_group=groups["dp"])


def check_tp(tp: int, world: int) -> int:
    """The dp size of ``world`` ranks. Raises ValueError when tp does not divide it."""
    if tp < 1 or world % tp:
        works = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(f"tp={tp} does not divide the world size {world}; tp could be one of {works}")
    return world // tp


def seed_ranks(mesh: Mesh) -> None:
    """Equal random streams within a tp group, where its first rank's stand; different ones for the dp ranks.

    The first rank's streams go on undisturbed, so whatever the script draws from them stays what it was.
    """
    if mesh.tp == 1 or mesh.is_virtual:
        return
    shared: list[Any] = [rng.get_streams(), torch.initial_seed()]
    dist.broadcast_object_list(shared, src=mesh.rank - mesh.tp_rank, group=mesh.tp_group)
    streams, seed = shared
    rng.set_streams(streams)
    everyone: list[Any] = [None] * mesh.dp
    dist.all_gather_object(everyone, [state.tolist() for state in streams], group=mesh.dp_group)
    if everyone[mesh.dp_rank] in everyone[: mesh.dp_rank]:
        # Scripts commonly seed all ranks alike; equal dropout masks would make dp ranks see less than they could.
        torch.manual_seed(seed + mesh.dp_rank)


def agree_on_weights(model: nn.Module, mesh: Mesh) -> None:
    """Make a dense model equal on the ranks of a tp group, to the group's first rank's, where it is not.

    Scripts may seed every rank differently and count on data-parallel engines to broadcast rank 0's weights.
    """
    if mesh.tp == 1 or mesh.is_virtual:
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if not tensors:
        return
    sums: list[Any] = [None] * mesh.tp
    dist.all_gather_object(sums, [int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors], group=mesh.tp_group)
    if all(other == sums[0] for other in sums):
        return
    device = _communication_device(mesh)
    for tensor in tensors:
        moved = tensor.detach().to(device)
        dist.broadcast(moved, src=mesh.rank - mesh.tp_rank, group=mesh.tp_group)
        tensor.detach().copy_(moved)


def _communication_device(mesh: Mesh) -> torch.device:
    """Where the tp group's backend takes its tensors, whatever device the model is on so far."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "gloo" in dist.get_backend(mesh.tp_group):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(integers[tensor.element_size()])
