"""What a scheduled module does around its own forward: syncs, checkpointing, random streams, partial parameters.

A module that a primitive changes keeps its identity, paths, parameters and hooks; its class becomes a subclass of its
own with the same name whose forward runs the module's ``Plan``. Hooks that anybody registers on the module hence see
what the untouched module would have given them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from . import rng
from .collectives import gather_parts, is_tracing, sum_over
from .mesh import Mesh

Forward = Callable[..., Any]
# (run, args, kwargs) -> run(*args, **kwargs), whose activations are not kept
Recompute = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
# (module, the forward that it wraps, args, kwargs) -> output
Around = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Sync:
    """One applied sync: ``before`` maps an input tensor, ``after`` an output tensor, ``inputs`` says which inputs."""

    mode: Literal["fwd_pre", "fwd_post", "bwd_post"]
    op: str
    function: Callable[[Tensor], Tensor]
    argument: str | None = None


def recompute(run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own recomputation, which replays the default random streams."""
    return checkpoint(rng.replayed(run), *args, use_reentrant=False, **kwargs)


@dataclass(frozen=True)
class Plan:
    """Everything that happens around one module's forward, in the order of ``run``."""

    mesh: Mesh
    kernel: Callable[..., Tensor] | None = None
    # the graph that runs in place of the module's own forward: (module, its forward, *args, **kwargs) -> output
    graph: Callable[..., Any] | None = None
    # what such a graph is made of in the place of the module's own forward: (module, its forward, *args, **kwargs)
    inside: Callable[..., Any] | None = None
    around: Around | None = None
    syncs: tuple[Sync, ...] = ()
    deferred_bias: bool = False
    # graphs around it add the bias themselves
    decomposed: bool = False
    checkpoint: bool = False
    random: Literal["default", "forked", "shared"] = "default"
    # how a module is recomputed, and where its random numbers come from: a runtime may have ways of its own
    recompute: Recompute = recompute
    streams: rng.Streams = rng.STREAMS
    # parameter name -> how many neighbouring ranks hold the same slice and each see a part of its gradient
    partial_gradients: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def is_graph_only(self) -> bool:
        """Whether nothing happens but the graph: the short way of ``run``."""
        plain = Plan(self.mesh, graph=self.graph, decomposed=self.decomposed)
        return self.graph is not None and not self.mesh.is_virtual and self == plain


def plan_of(module: nn.Module) -> Plan | None:
    """The module's plan, None where no primitive changed how it runs."""
    return module.__dict__.get("_partbook_plan")


def change_plan(module: nn.Module, mesh: Mesh, **changes: Any) -> None:
    """Give ``module`` a plan, or change the one that it has."""
    plan = plan_of(module)
    if plan is None:
        plan = Plan(mesh)
        module.__class__ = _scheduled_class(cast(Hashable, type(module)))
    module.__dict__["_partbook_plan"] = dataclasses.replace(plan, **changes)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before any primitive changed how it runs."""
    return getattr(type(module), "_partbook_original", type(module))


@functools.cache
def _scheduled_class(cls: Any) -> Any:
    # wraps() keeps the signature: transformers' Trainer reads it to learn which columns the model takes.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(cls.forward, self), args, kwargs)

    names = {"forward": forward, "_partbook_original": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**names, "__qualname__": cls.__qualname__})


def run(
    module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], with_bias: bool = True
) -> Any:
    """The forward of a scheduled module; of a linear on request without its bias."""
    plan: Plan = module.__dict__["_partbook_plan"]
    if plan.is_graph_only:
        assert plan.graph is not None
        return plan.graph(module, forward, *args, **kwargs)
    if plan.mesh.is_virtual and not is_tracing():
        raise RuntimeError(
            f"this {type(module).__name__} is scheduled on a virtual mesh (tp={plan.mesh.tp}): it can be planned, "
            "counted and filled with weights; to run it, schedule it on the mesh of a dialect"
        )
    _sum_partial_gradients(module, plan)
    for sync in plan.syncs:
        args, kwargs = _apply_to_inputs(sync, module, args, kwargs)
    call = forward
    if plan.kernel:
        call = functools.partial(plan.kernel, module, **({} if with_bias else {"with_bias": False}))
    if plan.inside:
        call = functools.partial(plan.inside, module, call)
    if plan.graph:
        call = functools.partial(plan.graph, module, call)
    if plan.around:
        call = functools.partial(plan.around, module, call)
        output = call(args, kwargs)
    elif plan.checkpoint and module.training and torch.is_grad_enabled() and not has_past(module, args, kwargs):
        # Recomputing must not write a key-value cache a second time.
        args, kwargs = without_caches(args, kwargs)
        output = plan.recompute(functools.partial(_on_stream, plan, module.training, call), args, kwargs)
    else:
        output = _on_stream(plan, module.training, call, *args, **kwargs)
    for sync in plan.syncs:
        if sync.mode == "fwd_post":
            output = _apply_to_output(sync, output)
    if plan.deferred_bias and with_bias:
        # A partial sum takes its bias once, after the ranks' parts are added.
        output = output + module.get_parameter("bias")
    return output


def _on_stream(plan: Plan, training: bool, call: Forward, /, *args: Any, **kwargs: Any) -> Any:
    with _stream(plan, training):
        return call(*args, **kwargs)


def _stream(plan: Plan, training: bool) -> AbstractContextManager[None]:
    # Drawing a seed looks at a value, which a run on fake tensors does not have.
    if not training or plan.mesh.tp == 1 or plan.random == "default" or is_tracing():
        return nullcontext()
    return plan.streams.forked(plan.mesh.tp_rank) if plan.random == "forked" else plan.streams.shared()


def _apply_to_inputs(
    sync: Sync, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if sync.mode == "fwd_post":
        return args, kwargs
    if sync.argument is not None:
        return _apply_to_argument(sync, module, args, kwargs)
    if sync.mode == "bwd_post":
        # Every input of a parallel region gets a partial gradient.
        return tree_map(lambda x: sync.function(x) if _takes_gradient(x) else x, (args, kwargs), is_leaf=_is_cache)
    for i, value in enumerate(args):
        if _is_activation(value):
            return (*args[:i], sync.function(value), *args[i + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_activation(value):
            return args, {**kwargs, name: sync.function(value)}
    raise TypeError(f"{type(module).__name__} was called without a floating-point tensor that a {sync.op} could act on")


def _apply_to_argument(
    sync: Sync, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert sync.argument is not None
    if sync.argument in kwargs:
        return args, {**kwargs, sync.argument: sync.function(kwargs[sync.argument])}
    position = argument_names(module).index(sync.argument)
    if position >= len(args):
        raise TypeError(f"{type(module).__name__} was called without {sync.argument!r}, which a {sync.op} acts on")
    return (*args[:position], sync.function(args[position]), *args[position + 1 :]), kwargs


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the module's forward, without self."""
    return _argument_names(cast(Hashable, type(module)))


@functools.cache
def _argument_names(cls: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _apply_to_output(sync: Sync, output: Any) -> Any:
    if isinstance(output, Tensor):
        return sync.function(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
        return type(output)([sync.function(output[0]), *output[1:]])
    raise TypeError(f"a {sync.op} acts on a tensor or on the first of a tuple, not on a {type(output).__name__}")


def _is_activation(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _takes_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _is_cache(x: Any) -> bool:
    # Looked up, not imported: a plain PyTorch model does not need transformers.
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(x, caches.Cache)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Packages whose hooks only look after parameters, and whether they see to those too that are read without the hooks.
RUNTIMES: dict[str, bool] = {}


def has_hooks(module: nn.Module) -> bool:
    """Whether this module has hooks that are missed when a graph does its work."""
    return has_users_hooks(module) or bool(module._parameters and _fetching(module))


def has_users_hooks(module: nn.Module) -> bool:
    """Whether anybody but a runtime has hooks on this module."""
    return any(_package(hook) not in RUNTIMES for hooks in _HOOKS for hook in module.__dict__[hooks].values())


def fetch_parameters(module: nn.Module) -> None:
    """Have runtimes make the module's own parameters ready, as when it is called."""
    for hook in _fetching(module):
        hook(module, ())


def _fetching(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for hook in module._forward_pre_hooks.values() if not RUNTIMES.get(_package(hook), True)]


def _package(hook: Any) -> str:
    return getattr(hook, "__module__", "").partition(".")[0]


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module is called with a key-value cache."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and any(isinstance(x, caches.Cache) for x in (*args, *kwargs.values()))


def has_past(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module is called with a key-value cache that holds keys for it: a prefix, an earlier chunk."""
    if not has_cache(args, kwargs):
        return False
    layers = (below.__dict__.get("layer_idx") for below in module.modules())
    layer = next((index for index in layers if isinstance(index, int)), 0)
    return any(_is_cache(x) and x.get_seq_length(layer) != 0 for x in (*args, *kwargs.values()))


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call without its key-value caches: while they are empty, training has no use for them."""
    if not has_cache(args, kwargs):
        return args, kwargs
    return tuple(None if _is_cache(x) else x for x in args), {k: None if _is_cache(x) else x for k, x in kwargs.items()}


@contextmanager
def own_forward(module: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``instead(module, forward, *args, **kwargs)`` runs in the place of the module's own forward."""
    cls, plan = type(module), plan_of(module)
    change_plan(module, plan.mesh if plan else Mesh(), graph=instead, checkpoint=False, random="default")
    try:
        yield
    finally:
        module.__class__ = cls
        if plan is None:
            del module.__dict__["_partbook_plan"]
        else:
            module.__dict__["_partbook_plan"] = plan


def _sum_partial_gradients(module: nn.Module, plan: Plan) -> None:
    """See that the gradients of ``partial_gradients`` are complete when they reach the parameter.

    A hook on the parameter runs before the gradient is accumulated, so accumulation, ZeRO's reductions and DDP's all
    see whole gradients. It is looked after here because a copy of a parameter, or a new one, does not have it.
    """
    for name, sharers in plan.partial_gradients.items():
        parameter = module._parameters[name]
        if parameter is not None and parameter.requires_grad and not hasattr(parameter, "_partbook_sum"):
            handle = parameter.register_hook(functools.partial(_sum_gradient, plan.mesh, sharers))
            parameter._partbook_sum = handle  # type: ignore[attr-defined]


def _sum_gradient(mesh: Mesh, sharers: int, grad: Tensor) -> Tensor:
    assert mesh.tp_group is not None
    if sharers == mesh.tp:
        return sum_over(grad, mesh.tp_group)
    first = mesh.tp_rank // sharers * sharers
    return torch.stack(gather_parts(grad, mesh.tp_group)[first : first + sharers]).sum(dim=0)
