"""Make a sub-graph a function of tensors only, which a compiler can share between modules: no calls of child modules,
no nested regions, parameters as inputs."""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import textwrap
from typing import Any

from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer, Proxy, TraceError

from ..execution import has_hooks, plan_of
from .region import Region

# Python that could take another way for a stand-in than for a tensor, or that leaves something behind.
_NOT_STRAIGHT = (
    ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try, ast.With, ast.Assert, ast.comprehension, ast.Match,
    ast.Global, ast.Nonlocal, ast.Delete, ast.Yield, ast.Await,
)  # fmt: skip


def inline_modules(graph: fx.Graph, owner: nn.Module) -> dict[str, str]:
    """Replace calls of ``owner``'s child modules by what these compute, in place.

    ::

        call_module["act"](x)  ---->  torch.nn.functional.gelu(x, approximate="tanh")

    Gives the paths of the modules that stay calls, with the reason. A training flag becomes the constant that it is
    now: a graph is of one mode.
    """
    stay: dict[str, str] = {}
    for node in [node for node in graph.nodes if node.op == "call_module"]:
        reason = _why_opaque(owner.get_submodule(node.target)) or _inline(graph, node, owner)
        if reason:
            stay[node.target] = reason
    return stay


def inline_regions(graph: fx.Graph) -> set[str]:
    """Replace calls of regions by the nodes of their graphs, in place. Gives the paths of the modules that these
    regions compute themselves."""
    inlined: set[str] = set()
    # One after the other: what a region's graph brings in may be regions again.
    while node := next((node for node in graph.nodes if isinstance(node.target, Region)), None):
        region: Region = node.target
        inlined.update(region.inlined)
        inputs = region.graph.find_nodes(op="placeholder")
        # A compiled region may have no "self".
        arguments = node.args[len(node.args) - len(inputs) :]
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(region.graph, dict(zip(inputs, arguments, strict=True)))
        if isinstance(results, fx.Node):
            node.replace_all_uses_with(results)
        else:
            for item in list(node.users):
                assert item.target is operator.getitem
                item.replace_all_uses_with(results[item.args[1]])
                graph.erase_node(item)
        graph.erase_node(node)
    return inlined


def hoist_attributes(graph: fx.Graph) -> tuple[str, ...]:
    """Turn parameters and buffers that ``graph`` reads into placeholders behind the others; gives their names."""
    found: dict[str, fx.Node] = {}
    after = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in found:
            with graph.inserting_after(after):
                after = graph.placeholder(f"attribute_{len(found)}")
            after.meta = node.meta
            found[node.target] = after
        node.replace_all_uses_with(found[node.target])
        graph.erase_node(node)
    return tuple(found)


def _why_opaque(module: nn.Module) -> str:
    """Why the calls of ``module`` must stay calls, "" where nothing speaks against inlining them."""
    for name, each in module.named_modules():
        at = f"its child {name!r}" if name else "it"
        if has_hooks(each):
            return f"{at} has hooks"
        if plan_of(each) is not None:
            return f"other primitives have changed how {at} runs"
        if "forward" in each.__dict__ or type(each).__call__ is not nn.Module.__call__:
            return f"{at} is called in a way of its own"
        if not _is_straight(type(each)):
            forward = f"the forward of {at}" if name else "its forward"
            return f"{forward} is more than a sequence of tensor operations"
    return ""


def _is_straight(cls: type[nn.Module]) -> bool:
    """Whether the forward is plain statements one after the other, so that stand-ins see all that it does."""
    if hasattr(cls.forward, "__wrapped__"):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError):
        return False
    stores = any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) for n in ast.walk(tree))
    return not stores and not any(isinstance(n, _NOT_STRAIGHT) for n in ast.walk(tree))


def _inline(graph: fx.Graph, node: fx.Node, owner: nn.Module) -> str:
    """Run the module on stand-ins for its tensors and put what it did in the place of ``node``; else say why not."""
    assert isinstance(node.target, str)
    scratch = fx.Graph()
    tracer = GraphAppendingTracer(scratch)
    inputs = {each: scratch.placeholder(each.name) for each in node.all_input_nodes}
    module = _with_proxies(owner.get_submodule(node.target), node.target, tracer)
    stand_ins: Any = {each: Proxy(twin, tracer) for each, twin in inputs.items()}
    args, kwargs = fx.map_arg((node.args, node.kwargs), stand_ins.__getitem__)
    try:
        result = module.forward(*args, **kwargs)
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"its forward cannot run on stand-ins: {str(error).strip().splitlines()[0]}"
    if not isinstance(result, Proxy):
        return f"its forward returns a {type(result).__name__}"
    scratch.output(result.node)
    for each in [each for each in scratch.nodes if each.op == "get_attr" and not each.users]:
        scratch.erase_node(each)
    for each in scratch.nodes:
        each.meta = {"where": node.meta.get("where", "")}
    if result.node.op not in ("placeholder", "get_attr"):
        result.node.meta = dict(node.meta)
    with graph.inserting_before(node):
        copied = graph.graph_copy(scratch, {twin: each for each, twin in inputs.items()})
    assert isinstance(copied, fx.Node)
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
    return ""


def _with_proxies(module: nn.Module, path: str, tracer: GraphAppendingTracer) -> Any:
    """A shallow copy of ``module`` whose parameters and buffers are stand-ins; the module is not touched."""
    double: Any = copy.copy(module)

    def stand_ins(tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            name: None if tensor is None else Proxy(tracer.graph.get_attr(f"{path}.{name}"), tracer)
            for name, tensor in tensors.items()
        }

    double.__dict__["_parameters"] = stand_ins(module._parameters)
    double.__dict__["_buffers"] = stand_ins(module._buffers)
    double.__dict__["_modules"] = {
        name: None if child is None else _with_proxies(child, f"{path}.{name}", tracer)
        for name, child in module._modules.items()
    }
    return double
