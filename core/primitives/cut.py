"""``cut_pipeline_stage``: end a stage of the pipeline after a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import Problem
from ..primitive import Primitive, Site
from ..tracing.examples import default_inputs, shapes_of


@dataclass(frozen=True)
class CutPipelineStage(Primitive):
    """End a pipeline stage after this module, at any depth of the model.

    ::

        h: 0 1 2 3 4 5    --h.2.cut_pipeline_stage()-->    stage 0: ... h.0 h.1 h.2 | stage 1: h.3 h.4 h.5 ...

    ``build`` traces the modules around the cuts and splits them in program order. What derives from the raw batch
    alone (masks, position ids, rotary tables) is computed on every stage that needs it, so it does not cross. A
    parameter that several stages use is held by each of them, and its gradients are summed. Of a module that is called
    several times the last call ends the stage.

    ``inputs``: example arguments of the whole model, of which shapes and dtypes matter (default, for a transformers
    model: ids, labels and a padding mask).
    """

    verb: ClassVar[str] = "cut_pipeline_stage"
    inputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", shapes_of(self.inputs))

    def check(self, site: Site) -> Iterator[Problem]:
        state = site.state
        if not site.path:
            yield Problem("the model itself is no place for a cut", "cut after a module in it")
        if site.path in state.cuts:
            yield Problem("a stage ends here already")
        known = state.example_inputs
        if self.inputs is not None and known is not None and known != self.inputs:
            yield Problem("other example inputs were given before", "give them with the first cut only")
        elif self.inputs is None and known is None and not default_inputs(state.model):
            name = type(state.model).__name__
            yield Problem(
                f"no example inputs are known for a {name}",
                "cut_pipeline_stage(inputs={argument of the model: tensor, ...})",
            )

    def apply(self, site: Site) -> None:
        site.state.cuts.append(site.path)
        if self.inputs is not None:
            site.state.example_inputs = self.inputs

    def touches(self, site: Site) -> Iterator[str]:
        return iter(())
