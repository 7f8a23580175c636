"""The kinds of regions: run as they are, compiled by inductor or TorchScript, recomputed in the backward pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from ..errors import Problem
from ..execution import plan_of
from .code import Code, NoSelf, code_of, compile_graph
from .lowering import hoist_attributes, inline_modules, inline_regions
from .region import Region, cut_out, describe, is_size, problems_of

Compiler = Literal["inductor", "torchscript"] | None

# Kinds of call that one text may be compiled for: gradients on and off, dtypes, sizes of one. One that is compiled at
# every step soon reaches it, which is an error.
_MAX_VARIANTS = 64

# TorchScript's types of what a graph reads off a tensor. Its dtypes are numbers.
_READ_TYPES: dict[str, type] = {"device": torch.device, "dtype": int}


def fuse_problems(
    graph: fx.Graph, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], owner: nn.Module, compiler: Compiler
) -> Iterator[Problem]:
    """Why ``nodes`` cannot become a region that ``compiler`` compiles. Nothing is changed."""
    problems = list(problems_of(graph, nodes, outputs))
    yield from problems
    if problems or compiler is None:
        return
    recomputed = [node for node in nodes if _is_recomputed(node)]
    for node in recomputed:
        yield Problem(
            f"{describe(node)} is recomputed in the backward pass, which a compiled region cannot contain",
            "fuse first, then checkpoint around it",
        )
    calls = {str(node.target): owner.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    problems = [problem for path, child in calls.items() for problem in _not_compiled(path, child)]
    yield from problems
    if problems:
        return
    if compiler == "torchscript" and not recomputed:
        part, _ = cut_out(graph, nodes, outputs)
        inline_regions(part)
        _, stay = _lower(part, owner)
        for path, reason in stay.items():
            yield Problem(
                f"TorchScript cannot call the module {path!r} ({type(owner.get_submodule(path)).__name__}): {reason}",
                'leave it out of the nodes, or fuse with compiler="inductor"',
            )
        if not stay:
            try:
                _torchscript(_code_for_torchscript(part, "torchscript region"))
            # TorchScript raises RuntimeError subclasses, and whatever its reading of python text stumbles over.
            except Exception as error:
                yield Problem(
                    f"TorchScript refuses the region: {_first_line(error)}",
                    'leave that operation out of the nodes, or fuse with compiler="inductor"',
                )


def _not_compiled(path: str, child: nn.Module) -> Iterator[Problem]:
    """What happens at the call of a child that compiled code would leave out."""
    plan = plan_of(child)
    if plan is not None and plan.random != "default" and plan.mesh.tp > 1:
        yield Problem(
            f"{path!r} has a random stream of its own, which a compiled region cannot switch to",
            "fork_rng on the module around it, or leave it out of the nodes",
        )
    if any(below._backward_hooks or below._backward_pre_hooks for below in child.modules()):
        found = f"{path!r} ({type(child).__name__}) has backward hooks, which a compiled region does not call"
        yield Problem(found, "remove them first, or leave it out of the nodes")


def checkpoint_problems(
    graph: fx.Graph, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node] | None = None
) -> Iterator[Problem]:
    """Why ``nodes`` cannot become a region that is recomputed."""
    problems = list(problems_of(graph, nodes, outputs))
    yield from problems
    if problems:
        return
    # What comes from outside would be written a second time.
    inputs = [each for node in nodes for each in node.all_input_nodes if each not in nodes]
    outside = {each.meta["storage"]: each for each in inputs if "storage" in each.meta}
    for node in nodes:
        for key in node.meta.get("mutates") or ():
            if key in outside:
                yield Problem(
                    f"{describe(node)} writes in place to {outside[key].name!r}, which is made outside: recomputing "
                    "would write it twice",
                    f"leave {node.name!r} out of the nodes, or take {outside[key].name!r} in",
                )


def grouped(label: str, path: str = "") -> Callable[[fx.Graph], Region]:
    """Makes a region that runs its nodes as they are, under one name."""
    return lambda part: Region("grouped", label, part, compile_graph(part, _title(label, path)), path=path)


def checkpointed(label: str, path: str = "") -> Callable[[fx.Graph], Region]:
    """Makes a region that keeps only its inputs and runs again in the backward pass, random numbers included."""

    def make(part: fx.Graph) -> Region:
        function = compile_graph(part, _title(label, path))

        def run(owner: nn.Module, *inputs: Any) -> Any:
            if owner.training and torch.is_grad_enabled():
                return checkpoint(function, owner, *inputs, use_reentrant=False)
            return function(owner, *inputs)

        return Region("checkpoint", label, part, run, path=path)

    return make


def compiled(
    label: str, owner: nn.Module, compiler: Literal["inductor", "torchscript"], path: str = ""
) -> Callable[[fx.Graph], Region]:
    """Makes a compiled region, after clean ``fuse_problems``. Regions of equal text share what is compiled.

    ``owner`` is the traced module: what its children compute becomes part of the region where that is possible; it is
    not kept.
    """

    def make(part: fx.Graph) -> Region:
        inlined = inline_regions(part) | {str(node.target) for node in part.find_nodes(op="call_module")}
        attributes, stay = _lower(part, owner)
        if compiler == "torchscript":
            assert not stay
            function = _torchscript(_code_for_torchscript(part, _title(label, path)))
        else:
            random = any(node.meta.get("random") for node in part.nodes)
            function = _inductor(code_of(part, _title(label, path)), random)
        run = function if stay else lambda owner, *inputs: function(*inputs)
        done = tuple(sorted(inlined - stay.keys()))
        return Region(compiler, label, part, run, path=path, attributes=attributes, inlined=done)

    return make


def label_of(nodes: Sequence[fx.Node], prefix: str = "fused") -> str:
    """A name made of what the nodes do: ``fused_softmax_dropout``."""
    names = [
        node.target.rpartition(".")[2] if isinstance(node.target, str) else node.target.__name__
        for node in nodes
        if node.op.startswith("call_") and node.target not in (operator.getitem, getattr) and not is_size(node)
    ]
    return "_".join([prefix, *dict.fromkeys(name.strip("_") for name in names)][:6])


def _lower(part: fx.Graph, owner: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """Make ``part`` a function of tensors. Gives the parameters that are its last inputs now, and the modules that it
    still calls, with the reasons; where there are none it has no "self"."""
    stay = inline_modules(part, owner)
    attributes = hoist_attributes(part)
    if not stay:
        me = next(iter(part.nodes))
        assert me.target == "self"
        part.erase_node(me)
        part.set_codegen(NoSelf())
    return attributes, stay


def _is_recomputed(node: fx.Node) -> bool:
    if not isinstance(node.target, Region):
        return False
    return node.target.kind == "checkpoint" or any(map(_is_recomputed, node.target.graph.nodes))


# Bounded, because what is compiled is large; a region keeps its own.
@functools.lru_cache(maxsize=512)
def _inductor(code: Code, random: bool) -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload]  # its overloads lack recompile_limit
        code.function(),
        fullgraph=True,
        # One compilation for all lengths, from the first call on. None would compile for the first length, again when
        # it changes, and again for each further size that changes. What is a constant of the graph or a parameter's
        # size still becomes a constant of the kernel, and with it the hidden sizes of most inputs.
        dynamic=True,
        recompile_limit=_MAX_VARIANTS,
        # The same masks as without the region for the same seed.
        options={"fallback_random": True} if random else None,
    )


@functools.lru_cache(maxsize=512)
def _torchscript(code: Code) -> Callable[..., Any]:
    function = code.function()
    function.__module__ = "partbook_generated"
    return torch.jit.script(function)


def _code_for_torchscript(part: fx.Graph, label: str) -> Code:
    # An argument without annotation is a tensor.
    for node in part.nodes:
        if node.op == "placeholder":
            node.type = _type_of(node)
    return code_of(part, label)


def _type_of(node: fx.Node) -> type | None:
    if node.meta.get("reads") in _READ_TYPES:
        return _READ_TYPES[node.meta["reads"]]
    value = node.meta.get("val", node.meta.get("size"))
    if isinstance(value, bool):
        return bool
    if isinstance(value, float | torch.SymFloat):
        return float
    return int if is_size(node) or isinstance(value, int | torch.SymInt) else None


def _title(label: str, path: str) -> str:
    return f"{path} {label}".strip()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip(':')}" if lines else type(error).__name__
