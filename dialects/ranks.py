"""The mesh over the running world, and what its ranks must agree on before they train: weights and random streams."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partbook.core import Mesh


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
        for ranks in plan.rank_groups(axis):  # type: ignore[arg-type]
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
    """Equal random streams within a tp group, different ones for each dp rank, from rank 0's seed."""
    if mesh.tp == 1 or mesh.is_virtual:
        return
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=_group_device())
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed) + mesh.dp_rank)


def _group_device() -> torch.device:
    """Where the default group's collectives take their tensors."""
    accelerator = torch.accelerator.current_accelerator()
    on_cpu = accelerator is None or "gloo" in dist.get_backend()
    return torch.device("cpu") if on_cpu or accelerator is None else accelerator


def agree_on_weights(model: nn.Module, mesh: Mesh) -> None:
    """Make a dense model equal on the ranks of a tp group, to the group's first rank's, where it is not.

    Scripts may seed every rank differently and count on data-parallel engines to broadcast rank 0's weights.
    """
    if mesh.tp == 1 or mesh.is_virtual:
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if not tensors:
        return
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors])
    first = sums.clone()
    source = mesh.rank - mesh.tp_rank
    dist.broadcast(first, src=source, group=mesh.tp_group)
    differs = (sums != first).any().to(torch.int32)
    dist.all_reduce(differs, group=mesh.tp_group)
    if differs:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=source, group=mesh.tp_group)


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(integers[tensor.element_size()])
