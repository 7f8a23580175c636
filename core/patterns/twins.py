"""Modules and the functions that they stand for: ``nn.GELU()(x)`` is ``F.gelu(x)``."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ..execution import original_class
from .operation import Attribute, Operation, common_name, equal_literals, operation

Function = Callable[..., Any]

# Module types that do nothing but call a function, with attributes that have the names of its arguments.
_TWINS: dict[type[nn.Module], tuple[Function, tuple[str, ...]]] = {
    nn.GELU: (functional.gelu, ("approximate",)),
    nn.ReLU: (functional.relu, ("inplace",)),
    nn.SiLU: (functional.silu, ("inplace",)),
    nn.Tanh: (torch.tanh, ()),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Softmax: (functional.softmax, ("dim",)),
    nn.Dropout: (functional.dropout, ("p", "training", "inplace")),
    nn.LayerNorm: (functional.layer_norm, ("normalized_shape", "weight", "bias", "eps")),
    nn.RMSNorm: (functional.rms_norm, ("normalized_shape", "weight", "eps")),
    nn.Linear: (functional.linear, ("weight", "bias")),
    nn.Embedding: (
        functional.embedding,
        ("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    ),
}


class HasTwin(Protocol):
    """A callable target of call_function nodes that stands for one call of a torch function, to patterns as well."""

    def twin_arguments(self, owner: nn.Module, args: tuple[Any, ...]) -> tuple[Function, Mapping[str, Any]]:
        """The function, and its arguments by name. ``args`` are those of the node, so nodes and constants; a
        parameter is an ``Attribute``, its path relative to ``owner``, the traced module."""


@dataclass(frozen=True)
class AnyTensor:
    """Any parameter of this shape: what stands for the parameters of a module that is written in a pattern."""

    shape: tuple[int, ...]


def function_twin(module: nn.Module) -> tuple[Function, dict[str, Any]] | None:
    """The function that ``module`` stands for and what it passes to it besides the input.

    By exact type: a subclass may do something else. None as well for an instance with a forward of its own.
    """
    cls = original_class(module)
    if "forward" in module.__dict__:
        return None
    if cls in _TWINS:
        function, names = _TWINS[cls]
        return function, {name: getattr(module, name) for name in names}
    # Looked up, not imported: a plain PyTorch model does not need transformers.
    activations = sys.modules.get("transformers.activations")
    if activations is None:
        return None
    if cls is activations.SiLUActivation:
        return functional.silu, {}
    if cls in (activations.GELUActivation, activations.GELUTanh):
        # Both can be told to compute by hand, which rounds differently.
        act: Any = module.act
        act = act if isinstance(act, functools.partial) else functools.partial(act)
        return (act.func, act.keywords) if act.func is functional.gelu else None
    return None


def operation_of_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], path: str | None
) -> Operation | None:
    """The functional twin of a call of ``module``, None where it has none.

    Its parameters and its mode become Attributes below ``path``: one graph may serve both modes. For a module without
    a path, written in a pattern, parameters become AnyTensor and the mode is a constant.
    """
    twin = function_twin(module)
    if twin is None or len(args) + len(kwargs) != 1:
        return None
    function, settings = twin
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if path is not None and (name == "training" or isinstance(value, Tensor)):
            given[name] = Attribute(f"{path}.{name}")
        else:
            given[name] = AnyTensor(tuple(value.shape)) if isinstance(value, Tensor) else value
    return operation(function, (*args, *kwargs.values()), given)


def name_of_node(node: fx.Node, owner: nn.Module) -> Any:
    """The name of ``operation_of_node``, which is quicker to tell; None where the node is no operation."""
    if node.op == "call_module":
        twin = function_twin(owner.get_submodule(str(node.target)))
        return common_name(twin[0]) if twin and len(node.args) + len(node.kwargs) == 1 else None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in (getattr, operator.getitem) or hasattr(node.target, "twin_arguments"):
        found = operation_of_node(node, owner)
        return found and found.name
    return common_name(node.target)


def operation_of_node(node: fx.Node, owner: nn.Module) -> Operation | None:
    """The call that ``node`` makes, a module's by its functional twin; None where the node is no operation."""
    if node.op == "call_module":
        return operation_of_module(owner.get_submodule(str(node.target)), node.args, node.kwargs, str(node.target))
    if node.op not in ("call_function", "call_method"):
        return None
    if hasattr(node.target, "twin_arguments"):
        twin: HasTwin = node.target
        function, arguments = twin.twin_arguments(owner, node.args)
        return operation(function, (), arguments)
    return operation(node.target, node.args, node.kwargs)


def different_setting(a: nn.Module, b: nn.Module) -> str:
    """The first setting in which two modules differ, "" where there is none.

    Settings are the class, the public attributes (so the mode too), shapes of parameters, and those of all children.
    """
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    if ours.keys() != theirs.keys():
        return "children"
    for path, module in ours.items():
        other = theirs[path]
        if original_class(module) is not original_class(other):
            return "class"
        mine, its = _settings(module), _settings(other)
        for name in {**mine, **its}:
            if name not in mine or name not in its or not _equal(mine[name], its[name]):
                return f"{path}.{name}".lstrip(".")
    return ""


def _settings(module: nn.Module) -> dict[str, Any]:
    tensors = {**module._parameters, **module._buffers}
    shapes = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}
    return {name: value for name, value in vars(module).items() if name[0] != "_"} | shapes


def _equal(a: Any, b: Any) -> bool:
    # Equality of anything but constants may be undefined (tensors), or the identity anyway.
    plain = isinstance(a, bool | int | float | str | tuple | list | torch.dtype | None)
    return a is b or (plain and equal_literals(a, b))
