"""Gradients of a pipeline's rank after a step: summed over the stages that share a parameter, averaged over dp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partbook.core import Mesh, ScheduledModel

# bytes of gradients that are reduced at once, as in DistributedDataParallel
_BUCKET = 25 * 2**20


class Reduction:
    """What the ranks owe each other of their gradients. Made, entered and left by every rank."""

    def __init__(self, scheduled: ScheduledModel) -> None:
        self._parameters = list(scheduled.model.parameters())
        self._mesh = scheduled.mesh
        self._ties = list(_ties_of(scheduled))

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Around a step: what it adds to the gradients is complete when it is over."""
        # As they are now: parameters may be frozen and unfrozen between steps, on all ranks alike.
        ties = [(parameter, group) for parameter, group in self._ties if parameter.requires_grad]
        tied = [parameter for parameter, _ in ties]
        # Earlier gradients of shared parameters are sums already: only what a step adds is summed.
        before = [parameter.grad for parameter in tied]
        for parameter in tied:
            parameter.grad = None
        yield
        for parameter, group in ties:
            _reduce([parameter], group, 1)
        for parameter, earlier in zip(tied, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        if self._mesh.dp > 1:
            for bucket in _buckets([parameter for parameter in self._parameters if parameter.requires_grad]):
                _reduce(bucket, self._mesh.dp_group, self._mesh.dp)


def _ties_of(scheduled: ScheduledModel) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters that other pipeline ranks hold too, with the group of those ranks."""
    mesh = scheduled.mesh
    groups = {tuple(range(mesh.pp)): mesh.pp_group}
    for tie in scheduled.ties_across:
        stages = tuple(tie.ranks)
        if stages not in groups:
            groups[stages] = _group_of(mesh, stages)
        if mesh.pp_rank in stages:
            yield scheduled.model.get_parameter(tie.names[mesh.pp_rank]), groups[stages]


def _group_of(mesh: Mesh, stages: Sequence[int]) -> Any:
    """The group of these ranks of this pipeline. Collective: every rank of the world calls it."""
    found = None
    for pipeline in mesh.rank_groups("pp"):
        group = dist.new_group([pipeline[stage] for stage in stages])
        if mesh.rank in pipeline:
            found = group
    return found


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and ((parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device) or size >= _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _reduce(parameters: Sequence[nn.Parameter], group: Any, parts: int) -> None:
    """Sum the gradients over ``group`` and divide them by ``parts``. What no rank has a gradient of gets none."""
    flat = [_flat(parameter) for parameter in parameters]
    has_one = torch.tensor([float(p.grad is not None) for p in parameters], dtype=flat[0].dtype, device=flat[0].device)
    reduced = torch.cat([*flat, has_one])
    reduced[: -len(parameters)] /= parts
    dist.all_reduce(reduced, group=group)
    *sums, have_one = reduced.split([*(p.numel() for p in parameters), len(parameters)])
    for i, (parameter, total) in enumerate(zip(parameters, sums, strict=True)):
        if parameter.grad is not None:
            parameter.grad.copy_(total.view_as(parameter))
        elif have_one[i]:
            parameter.grad = total.view_as(parameter).clone()


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().reshape(-1)
