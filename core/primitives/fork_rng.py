"""``fork_rng``: random numbers that differ between the tp ranks inside a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import Problem, did_you_mean
from ..execution import change_plan, plan_of
from ..primitive import Primitive, Site


@dataclass(frozen=True)
class ForkRng(Primitive):
    """Run this module on a random stream of its own on every tp rank, except its descendants ``shared``.

    Dropout on a sharded activation must differ between the ranks, on a replicated one it must agree::

        sch["attn"].fork_rng(shared=("resid_dropout",))      # attention probabilities differ, the residual agrees

    Only training is affected, and nothing on a single rank. Recomputation replays the exact states.
    """

    verb: ClassVar[str] = "fork_rng"
    shared: tuple[str, ...] = ()

    def check(self, site: Site) -> Iterator[Problem]:
        paths = dict(site.module.named_modules())
        for path in ("", *self.shared):
            if path not in paths:
                yield Problem(f"it has no module {path!r}", did_you_mean(path, paths))
                continue
            plan = plan_of(paths[path])
            if plan is not None and plan.random != "default":
                yield Problem(f"{path or 'it'} has a {plan.random} random stream already")

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())

    def apply(self, site: Site) -> None:
        if site.mesh.tp == 1:
            return
        change_plan(site.module, site.mesh, random="forked")
        for path in self.shared:
            change_plan(site.module.get_submodule(path), site.mesh, random="shared")
