"""``fuse``: a match in a module's graph becomes one call, which a compiler makes one kernel of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import Problem, did_you_mean
from ..match import Match, Place
from ..primitive import Primitive, Site
from ..tracing.fused import Compiler
from ..tracing.rewrites import FuseAt
from .in_graph import apply_rewrite, check_rewrite

_COMPILERS = ("inductor", "torchscript", None)


@dataclass(frozen=True)
class Fuse(Primitive):
    """Run the nodes of ``match`` as one.

    ::

        %add = x + bias;  %gelu = F.gelu(%add)    --fuse(match)-->    %fused_add_gelu = fused_add_gelu(x, bias)

    ``compiler``: "inductor" (``torch.compile``; equal matches of a model share what is compiled, for all lengths),
    "torchscript", or None to group the nodes only. With inductor, dropout inside draws the same masks as without.
    """

    verb: ClassVar[str] = "fuse"
    match: Match
    compiler: Compiler = "inductor"

    def check(self, site: Site) -> Iterator[Problem]:
        if self.compiler not in _COMPILERS:
            yield Problem(
                f"no compiler {self.compiler!r}", did_you_mean(str(self.compiler), ["inductor", "torchscript"])
            )
        else:
            yield from check_rewrite(site, self.match, self._rewrite)

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())

    def apply(self, site: Site) -> None:
        apply_rewrite(site, self.match, self._rewrite)

    def _rewrite(self, place: Place) -> FuseAt:
        return FuseAt(place, self.as_call(), self.compiler)
