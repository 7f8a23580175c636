"""``trace``: give one module a graph, so that parts of its forward can be found and transformed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import Problem, TraceError
from ..execution import change_plan, plan_of
from ..primitive import Primitive, Site
from ..state import State
from ..tracing.examples import default_inputs, shapes_of
from ..tracing.kind import arranger_of
from ..tracing.traced import RewriteError, Traced


@dataclass(frozen=True)
class Trace(Primitive):
    """Record this module's forward as a graph that runs in its place; its children stay calls.

    ::

        def forward(self, x):                    --trace()-->    %fc = call_module[fc](%x)
            return F.gelu(self.fc(x)) * 2                        %gelu = F.gelu(%fc);  %mul = operator.mul(%gelu, 2)

    The real Python runs on fake tensors with symbolic sizes, so the graph holds for other sizes. Path, parameters,
    hooks and state-dict keys stay. A call of a new kind (another argument given, another dtype or attribute that the
    Python looks at) is traced when it comes; if it cannot be, it raises GuardError. A call with a key-value cache runs
    the module's own forward (and where the call does not say ``use_cache``, none is made).

    Args: ``inputs`` are example arguments of the whole model, of which shapes and dtypes matter (default, for a
    transformers model: ids and labels, with and without a padding mask). ``leaves`` are functions that stay one node.
    """

    verb: ClassVar[str] = "trace"
    inputs: Mapping[str, Any] | None = None
    leaves: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", shapes_of(self.inputs))
        object.__setattr__(self, "leaves", tuple(self.leaves))

    def check(self, site: Site) -> Iterator[Problem]:
        plan = plan_of(site.module)
        if plan is not None and plan.graph is not None:
            yield Problem("it is traced already", "find, replace, fuse and checkpoint use the graph that it has")
        elif plan is not None and plan.kernel is not None:
            yield Problem(
                f"this {type(site.module).__name__} runs on a kernel of its shards", "trace the module around it"
            )
        elif not self._inputs(site):
            name = type(site.state.model).__name__
            yield Problem(
                f"no example inputs are known for a {name}", "trace(inputs={argument of the model: tensor, ...})"
            )
        else:
            try:
                self.graphs(site)
            except TraceError as error:
                yield Problem(str(error))

    def apply(self, site: Site) -> None:
        # The graphs are in the library since the check.
        change_plan(site.module, site.mesh, graph=self.graphs(site))

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())

    def _inputs(self, site: Site) -> list[Mapping[str, Any]]:
        if self.inputs is None:
            return [*default_inputs(site.state.model, site.mesh.tp)]
        return [self.inputs]

    def graphs(self, site: Site) -> Traced:
        """What ``apply`` gives the module. Raises TraceError."""
        arranger, inputs = arranger_of(site.module), tuple(self._inputs(site))
        return Traced(site.path, arranger, site.state.library, inputs, self.leaves).traced(site.state.model)


def graph_of(site: Site) -> Traced | None:
    """The graphs of this module, None where it is not traced."""
    plan = plan_of(site.module)
    return plan.graph if plan is not None and isinstance(plan.graph, Traced) else None


def current(site: Site) -> Traced:
    """The graphs of a traced module as it is now: recorded again after something in it has changed.

    Raises TraceError or RewriteError where that fails.
    """
    traced = graph_of(site)
    assert traced is not None
    if not traced.kinds:
        traced = traced.traced(site.state.model)
        change_plan(site.module, site.mesh, graph=traced)
    return traced


def changed(state: State, path: str) -> None:
    """Something about this module changed: its graph and those around it no longer show what is there."""
    names = path.split(".") if path else []
    for i in range(len(names) + 1):
        around = Site(state, ".".join(names[:i]))
        traced = graph_of(around)
        if traced is not None and traced.kinds:
            change_plan(around.module, state.mesh, graph=traced.emptied())


def no_longer_shown(state: State, path: str) -> None:
    """A child whose work a graph around it does itself was changed: that graph is made again with its call."""
    names = path.split(".") if path else []
    for i in range(len(names)):
        around, below = Site(state, ".".join(names[:i])), ".".join(names[i:])
        traced = graph_of(around)
        if traced is not None and any(below == relied.path for kind in traced.kinds for relied in kind.relies_on):
            change_plan(around.module, state.mesh, graph=traced.emptied())


def bypassed(site: Site) -> Iterator[Problem]:
    """Why nothing that is done to this module would have an effect: a graph around it does not call it."""
    names = site.path.split(".") if site.path else []
    for i in range(len(names)):
        traced, below = graph_of(Site(site.state, ".".join(names[:i]))), ".".join(names[i:])
        for path, instead in traced.bypassed.items() if traced is not None else ():
            if below == path or below.startswith(f"{path}."):
                around = ".".join(names[:i]) or "the model"
                yield Problem(
                    f"the graph of {around!r} does not call it any more, but {instead}", "do it before replace"
                )


def unfinished(site: Site) -> Iterator[Problem]:
    """Why the graphs of this module cannot be made again."""
    try:
        if graph_of(site) is not None:
            for kind in current(site).kinds:
                kind.compile()
    except (TraceError, RewriteError) as error:
        yield Problem(
            f"its graph cannot be made again after it was changed: {error}", "make that change before trace()"
        )
