"""The mesh over the running world, and what its ranks must agree on before they train: weights and random streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partbook.core import AgreementError, Mesh, ScheduledModel, rng
from partbook.core.mesh import Axis

# The axes of each group that a mesh has.
_GROUPS: dict[str, tuple[Axis, ...]] = {
    "tp_group": ("tp",),
    "dp_group": ("dp",),
    "pp_group": ("pp",),
    "model_group": ("pp", "tp"),
}


def make_mesh(tp: int = 1, pp: int = 1) -> Mesh:
    """The mesh of the running world: tp groups of neighbouring ranks, pp stages of ranks that are far apart, dp over
    what is left.

    Collective: every rank calls it. Without torch.distributed, the mesh of a single process. Raises ValueError when
    tp * pp does not divide the world size.
    """
    if not dist.is_initialized():
        if tp * pp != 1:
            raise ValueError(
                f"tp={tp} pp={pp} needs torch.distributed: start {tp * pp} processes and init_process_group first"
            )
        return Mesh()
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = Mesh(dp=check_sizes(tp, pp, world), pp=pp, tp=tp, rank=rank)
    # Every rank creates every group, in the same order.
    groups = {}
    for name, axes in _GROUPS.items():
        for ranks in plan.rank_groups(*axes):
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[name] = group
    return replace(plan, **groups)


def check_sizes(tp: int, pp: int, world: int) -> int:
    """The dp size of ``world`` ranks. Raises ValueError when tp * pp does not divide it."""
    if pp == 1 and (tp < 1 or world % tp):
        works = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(f"tp={tp} does not divide the world size {world}; tp could be one of {works}")
    if tp < 1 or pp < 1 or world % (tp * pp):
        works = [n for n in range(1, world // max(tp, 1) + 1) if world % (n * max(tp, 1)) == 0]
        raise ValueError(f"tp={tp} * pp={pp} does not divide the world size {world}; pp could be one of {works}")
    return world // (tp * pp)


def seed_ranks(mesh: Mesh) -> None:
    """Equal random streams within a tp group, where its first rank's stand; different ones for dp ranks.

    The first rank's streams go on undisturbed, so whatever the script draws from them stays what it was. Stages draw
    from streams of their own.
    """
    if mesh.tp == 1 or mesh.is_virtual:
        return
    shared: list[Any] = [rng.get_streams(), torch.initial_seed()]
    dist.broadcast_object_list(shared, src=mesh.rank - mesh.tp_rank, group=mesh.tp_group)
    streams, seed = shared
    rng.set_streams(streams)
    if mesh.pp > 1:
        return
    everyone: list[Any] = [None] * mesh.dp
    dist.all_gather_object(everyone, [state.tolist() for state in streams], group=mesh.dp_group)
    if everyone[mesh.dp_rank] in everyone[: mesh.dp_rank]:
        # Scripts commonly seed all ranks alike; equal dropout masks would make dp ranks see less than they could.
        torch.manual_seed(seed + mesh.dp_rank)


def agree_on_weights(model: nn.Module, mesh: Mesh) -> None:
    """Make a dense model equal on the ranks that hold one copy of it, to the first rank's, where it is not.

    Scripts may seed every rank differently and count on data-parallel engines to broadcast rank 0's weights.
    """
    if mesh.tp * mesh.pp == 1 or mesh.model_group is None:
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if not tensors:
        return
    sums: list[Any] = [None] * (mesh.tp * mesh.pp)
    mine = [int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors]
    dist.all_gather_object(sums, mine, group=mesh.model_group)
    if all(other == sums[0] for other in sums):
        return
    device = communication_device(mesh)
    for tensor in tensors:
        moved = tensor.detach().to(device)
        dist.broadcast(moved, group=mesh.model_group, group_src=0)
        tensor.detach().copy_(moved)


def spread(scheduled: ScheduledModel) -> None:
    """Make weights and buffers of all dp ranks those of the first, as DistributedDataParallel does."""
    if scheduled.mesh.dp > 1:
        device = communication_device(scheduled.mesh)
        for tensor in (*scheduled.model.parameters(), *scheduled.model.buffers()):
            moved = tensor.detach().to(device)
            dist.broadcast(moved, group=scheduled.mesh.dp_group, group_src=0)
            tensor.detach().copy_(moved)


def refuse_different(weights: Any) -> None:
    """Raise AgreementError where the ranks of the world were given different weights: a dense model, or a seed.

    Scripts may seed ranks differently, and a shard or a tied copy of another model fits without an error.
    """
    if isinstance(weights, nn.Module):
        weights = dict(weights.state_dict())
    if isinstance(weights, Mapping):
        mine: Any = {name: int(_bits(tensor).sum(dtype=torch.int64)) for name, tensor in weights.items()}
    elif isinstance(weights, int):
        mine = {"the seed": weights}
    else:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        different = [name for name in {**everyone[0], **other} if everyone[0].get(name) != other.get(name)]
        if different:
            raise AgreementError(
                f"the ranks were given different weights: {different[0]!r} of rank {rank} is not that of rank 0\n"
                "  hint: seed all ranks alike before the model is made, or pass a Hugging Face folder or one seed"
            )


def communication_device(mesh: Mesh) -> torch.device:
    """Where the model group's backend takes its tensors, whatever device the model is on so far."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "gloo" in dist.get_backend(mesh.model_group):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(integers[tensor.element_size()])
