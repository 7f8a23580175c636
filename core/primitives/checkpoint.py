"""``checkpoint``: recompute a module in the backward pass instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import Problem
from ..execution import change_plan, plan_of
from ..match import Match, Place
from ..primitive import Primitive, Site
from ..tracing.rewrites import CheckpointAt
from .in_graph import apply_rewrite, check_rewrite
from .shard_loss import holds_sharded_loss


@dataclass(frozen=True)
class Checkpoint(Primitive):
    """Keep only this module's inputs in the forward pass and run it again in the backward pass.

    ::

        memory of a block: its activations  --checkpoint()-->  its inputs; time: one more forward of the block

    Non-reentrant recomputation (``torch.utils.checkpoint``); random states are replayed, so gradients are bitwise the
    same. A key-value cache is not passed into a recomputed module while training (compare with ``use_cache=False``: a
    cache lays out keys and values differently, which rounds differently).

    With ``at=`` only a match in this module's graph is recomputed, such as the core of an attention.
    """

    verb: ClassVar[str] = "checkpoint"
    at: Match | None = None

    def check(self, site: Site) -> Iterator[Problem]:
        if self.at is not None:
            yield from check_rewrite(site, self.at, self._rewrite)
            return
        plan = plan_of(site.module)
        if plan is not None and plan.checkpoint:
            yield Problem("it is checkpointed already")
        if holds_sharded_loss(site):
            yield Problem("the model that holds a sharded loss cannot be checkpointed", "checkpoint its blocks")

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())

    def apply(self, site: Site) -> None:
        if self.at is not None:
            apply_rewrite(site, self.at, self._rewrite)
        else:
            change_plan(site.module, site.mesh, checkpoint=True)

    def _rewrite(self, place: Place) -> CheckpointAt:
        return CheckpointAt(place, self.as_call())
