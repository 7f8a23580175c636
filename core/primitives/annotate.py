"""``annotate`` and ``set_attribute``: facts about a parameter, and a module's own numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import Problem, did_you_mean
from ..primitive import Primitive, Site
from .shard import PARTIAL_GRADIENT, sums_gradient


@dataclass(frozen=True)
class Annotate(Primitive):
    """Note ``key: value`` for parameter ``param``, for a dialect or a tool of yours to read.

    One key is Partbook's own: ``partial_gradient=True`` says that each tp rank's backward sees only a part of this
    replicated parameter's uses (a norm on a slice of the sequence), so its gradient is summed over the tp ranks.
    """

    verb: ClassVar[str] = "annotate"
    param: str
    key: str
    value: Any

    def check(self, site: Site) -> Iterator[Problem]:
        missing = list(site.missing_parameter(self.param))
        yield from missing
        if missing or self.key != PARTIAL_GRADIENT:
            return
        name = site.full_name(self.param)
        if self.value is not True:
            yield Problem(f"{PARTIAL_GRADIENT} can only be True", "leave it out otherwise")
        if name in site.state.layouts:
            yield Problem(f"{name} is sharded: each rank has the whole gradient of its slice")
        if PARTIAL_GRADIENT in site.state.annotations.get(name, {}):
            yield Problem(f"{name} has a partial gradient already")

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())

    def apply(self, site: Site) -> None:
        site.state.annotations.setdefault(site.full_name(self.param), {})[self.key] = self.value
        if self.key == PARTIAL_GRADIENT:
            parameter = site.module.get_parameter(self.param)
            for module, _, name in list(site.state.owners(parameter)):
                sums_gradient(module, name, site.mesh.tp, site)


@dataclass(frozen=True)
class SetAttribute(Primitive):
    """Give a number (or another plain value) that the module keeps about itself its per-rank value.

    ::

        attn.split_size 768  --set_attribute("split_size", 384)-->  384
    """

    verb: ClassVar[str] = "set_attribute"
    name: str
    value: Any

    def check(self, site: Site) -> Iterator[Problem]:
        module = site.module
        if not hasattr(module, self.name):
            plain = [name for name in vars(module) if not name.startswith("_")]
            yield Problem(f"{type(module).__name__} has no attribute {self.name!r}", did_you_mean(self.name, plain))
            return
        present = getattr(module, self.name)
        if isinstance(present, nn.Module | Tensor):
            yield Problem(f"{self.name!r} is a {type(present).__name__}", "use replace or shard")
        elif getattr(inspect.getattr_static(type(module), self.name, None), "fset", module) is None:
            yield Problem(f"{self.name!r} is a property that {type(module).__name__} computes itself")
        elif present is not None and type(present) is not type(self.value):
            yield Problem(f"{self.name!r} is a {type(present).__name__}, not a {type(self.value).__name__}")

    def apply(self, site: Site) -> None:
        setattr(site.module, self.name, self.value)
