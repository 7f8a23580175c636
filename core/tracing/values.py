"""Python values in a recorded forward, and the nodes that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..errors import TraceError
from .kind import CONSTANTS
from .outputs import storage
from .symbols import SIZES, Sizes, UnknownSize

_CACHE = "for a key-value cache: use_cache=False"


class Values:
    """Which node of ``graph`` has which value; ``sizes`` are the numbers among them.

    ``refusal`` makes the error for a value that a graph cannot hold.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, sizes: Sizes, refusal: Callable[..., TraceError]) -> None:
        self.graph, self.sizes, self._refusal = graph, sizes, refusal
        self._tensors: dict[int, tuple[Tensor, fx.Node]] = {}
        self._attributes = _tensors_of(module)
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._devices: dict[torch.device, fx.Node] = {}
        # a device that is no input's stays a constant
        self.has_fixed_device = False

    def attribute_name(self, value: Any) -> str | None:
        """The name of a parameter, buffer or tensor attribute of the module; None for any other value."""
        return self._attributes[id(value)][1] if id(value) in self._attributes else None

    def track(self, tensor: Tensor, node: fx.Node) -> None:
        # The tensor is kept, so that no other one gets its id.
        self._tensors[id(tensor)] = (tensor, node)
        node.meta.update(val=_look(tensor), requires_grad=tensor.requires_grad, storage=storage(tensor))

    def node_for(self, value: Any) -> Any:
        """What stands for ``value`` in the arguments of a node."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, SIZES):
            return self._size(value)
        if isinstance(value, torch.device):
            return self._device(value)
        if isinstance(value, tuple):
            items = [self.node_for(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.node_for(item) for item in value]
        if isinstance(value, slice):
            return slice(self.node_for(value.start), self.node_for(value.stop), self.node_for(value.step))
        if type(value) is dict:
            return {key: self.node_for(item) for key, item in value.items()}
        if isinstance(value, (*CONSTANTS, range, type(...), torch.finfo, torch.Generator)):
            return value
        if callable(value) and not isinstance(value, nn.Module):
            return value
        if tensors_in(value):
            # a registered container, such as a transformers output: made anew in the graph
            leaves, spec = pytree.tree_flatten(value)
            return self.graph.call_function(Unflatten(spec), ([self.node_for(leaf) for leaf in leaves],))
        raise self._refusal(
            f"a {type(value).__name__} is passed on, which a graph cannot hold",
            _CACHE,
        )

    def tensor(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][1]
        if id(tensor) in self._attributes:
            return self._attribute(self._attributes[id(tensor)][1], tensor)
        raise self._refusal(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} is neither made here nor an input, parameter, "
            "buffer or attribute of this module (a closure, a global, or torch.func)",
            "pass it as an argument or register it as a buffer",
        )

    def _attribute(self, name: str, tensor: Tensor) -> fx.Node:
        if name not in self._attribute_nodes:
            with self.graph.inserting_before(self._first_operation()):
                node = self.graph.get_attr(name)
            node.meta.update(val=_look(tensor), requires_grad=tensor.requires_grad, storage=storage(tensor))
            node.meta["is_parameter"] = isinstance(tensor, nn.Parameter)
            self._attribute_nodes[name] = node
        return self._attribute_nodes[name]

    def _first_operation(self) -> fx.Node:
        return next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)

    def _size(self, size: Any) -> Any:
        try:
            return self.sizes.build(size.node.expr)
        except UnknownSize as error:
            raise self._refusal(
                f"the size {error} is no size of its inputs", "pass it, or a tensor that has it, as an argument"
            ) from None

    def _device(self, device: torch.device) -> Any:
        """``device=x.device`` stays that: a model moves between devices."""
        if device not in self._devices:
            for node in self.graph.nodes:
                value = node.meta.get("val")
                if node.op == "placeholder" and isinstance(value, Tensor) and value.device == device:
                    with self.graph.inserting_before(self._first_operation()):
                        self._devices[device] = self.graph.call_function(getattr, (node, "device"))
                    self._devices[device].meta["kind"] = "device"
                    break
            else:
                self.has_fixed_device = True
                return device
        return self._devices[device]

    def forget(self) -> None:
        self._tensors.clear()
        self._attributes.clear()

    def known(self, tensor: Tensor) -> fx.Node | None:
        found = self._tensors.get(id(tensor))
        return None if found is None else found[1]


class Unflatten:
    """Makes a registered container out of its items."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec
        self.__name__ = self.__qualname__ = f"make_{getattr(spec.type, '__name__', 'container')}"
        self.__module__ = __name__

    def __call__(self, items: list[Any]) -> Any:
        return pytree.tree_unflatten(items, self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unflatten) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.__name__)


def _tensors_of(module: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """Every tensor that the module or one below it holds: parameters, buffers, plain attributes."""
    found: dict[int, tuple[Tensor, str]] = {}
    for path, below in module.named_modules():
        for name, value in {**below._parameters, **below._buffers, **vars(below)}.items():
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                found.setdefault(id(value), (value, f"{path}.{name}".lstrip(".")))
    return found


def _look(tensor: Tensor) -> Tensor:
    """A fake tensor that looks the same. Not even detached, the original must not be kept: a view keeps its base, and
    the history of the recorded run the parameters' gradient accumulators, of the shapes from before a shard."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
