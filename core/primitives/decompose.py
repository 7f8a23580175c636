"""``decompose``: a linear becomes a product and a bias in the graph of its parent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import Problem
from ..execution import change_plan, has_hooks, plan_of
from ..primitive import Primitive, Site
from ..roles import is_linear


@dataclass(frozen=True)
class Decompose(Primitive):
    """Show this linear's product and its bias as two nodes in graphs around it, so that the bias can be fused.

    ::

        %fc = call_module[fc](x)    --decompose()-->    %product = product(fc, x);  %add = %product + fc.bias

    The product keeps the shards and syncs of the linear; a row-parallel one is summed before its bias is added.
    """

    verb: ClassVar[str] = "decompose"

    def check(self, site: Site) -> Iterator[Problem]:
        module = site.module
        plan = plan_of(module)
        if not is_linear(module):
            yield Problem(f"{type(module).__name__} is no linear", "nn.Linear and transformers' Conv1D are")
        elif getattr(module, "bias", None) is None:
            yield Problem("it has no bias", "its product is all that it computes")
        elif plan is not None and plan.decomposed:
            yield Problem("it is decomposed already")
        elif has_hooks(module):
            yield Problem("it has hooks, which would not be called any more", "remove them first")
        elif plan is not None and plan.checkpoint:
            yield Problem("it is checkpointed", "checkpoint what is around it")

    def apply(self, site: Site) -> None:
        change_plan(site.module, site.mesh, decomposed=True)
