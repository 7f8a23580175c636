"""Recording one forward: every torch call of the module's own Python becomes a node, every child a ``call_module``."""

from __future__ import annotations

import linecache
import operator
import random as python_random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..errors import TraceError
from .canon import canonical, property_name, setitem
from .kind import CONSTANTS, Argument, Conditions, Leaf
from .product import Product
from .outputs import VALUE_DEPENDENT, storage
from .snapshot import Read, Snapshot
from .symbols import SIZES, Sizes, UnknownSize

if TYPE_CHECKING:
    from .session import Session

# calls that are kept although they return no tensor
_EFFECTS = {"_set_grad_enabled", "_assert_async"}
# calls that hand values of a tensor, not its shape, to Python
_READ_VALUES = {
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__contains__", "__array__", "data_ptr",
}  # fmt: skip
# calls whose Python side a graph cannot repeat
_REFUSED = {
    "register_hook": "a hook is Python that a graph cannot hold",
    "register_post_accumulate_grad_hook": "a hook is Python that a graph cannot hold",
    "backward": "it runs a backward pass",
    "requires_grad_": "it changes a tensor's requires_grad",
    "retain_grad": "it asks for a gradient",
    "set_": "it exchanges a tensor's memory",
}
_DTYPES = {"dtype", "is_floating_point", "is_complex", "element_size", "itemsize", "nbytes", "type", "is_signed"}
_GRADIENTS = {"requires_grad", "grad_fn", "is_leaf"}


@dataclass
class Recording:
    """One recorded forward: its graph, the look of its arguments and result, and the conditions under which it holds."""

    graph: fx.Graph
    arguments: list[Argument]
    output: pytree.TreeSpec
    conditions: Conditions
    # what its leaves read, and their outputs may depend on: other modules with the same graph agree in it
    leaf_reads: tuple[Read, ...]


class Recorder:
    """Records the forward of ``module`` into ``graph``; ``names`` are the paths of its children."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session, self.module = session, module
        self.graph = fx.Graph()
        self.conditions = Conditions()
        self.sizes = Sizes(self.graph, session.shapes.replace)
        self.graph.placeholder("self")
        self.paths: dict[int, str] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(child), path)
        self._values: dict[int, tuple[Any, fx.Node]] = {}
        self._attributes = _tensors_of(module)
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._devices: dict[torch.device, fx.Node] = {}
        self._reads: dict[tuple[str, str], Read] = {}
        self._random_state = python_random.getstate()

    # ------------------------------------------------------------------ inputs and outputs

    def inputs(self, given: dict[str, Any]) -> list[Argument]:
        """Placeholders for the tensors and sizes of the arguments."""
        arguments, first = [], {}
        for name, value in given.items():
            leaves, spec = pytree.tree_flatten(value)
            found = []
            for i, leaf in enumerate(leaves):
                where = name if len(leaves) == 1 else f"{name}_{i}"
                found.append(self._input(where, name, leaf, first))
            arguments.append(Argument(name, spec, tuple(found)))
        for node in self.graph.nodes:
            if "val" in node.meta:
                self.sizes.add_tensor(node, node.meta["val"].shape)
        return arguments

    def _input(self, where: str, name: str, leaf: Any, first: dict[int, str]) -> Leaf:
        if isinstance(leaf, Tensor):
            node = self.graph.placeholder(where)
            if id(leaf) in first:
                node.meta["same_as"] = first[id(leaf)]
            first.setdefault(id(leaf), node.name)
            self._track(leaf, node)
            return Leaf(node.name)
        if isinstance(leaf, torch.SymInt):
            node = self.graph.placeholder(where)
            node.meta.update(size=leaf.node.expr, kind="sym")
            self.sizes.add_number(node, leaf)
            return Leaf(node.name, is_size=True)
        if isinstance(leaf, CONSTANTS):
            return Leaf(constant=leaf)
        raise self.refusal(
            f"the argument {name!r} is a {type(leaf).__name__}; tensors, plain constants and containers of them are known",
            "for a key-value cache: use_cache=False",
        )

    def output(self, result: Any) -> pytree.TreeSpec:
        """The output node; the nodes that nothing needs are dropped."""
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *SIZES, *CONSTANTS)):
                raise self.refusal(
                    f"it returns a {type(leaf).__name__}, which a graph cannot hold",
                    "for a key-value cache: use_cache=False",
                )
        self.check_side_effects()
        self.graph.output([self.argument(leaf) for leaf in leaves])
        for node in reversed(list(self.graph.nodes)):
            kept = node.users or node.op in ("placeholder", "output", "call_module")
            if not (kept or node.meta.get("mutates") or node.meta.get("effect")):
                self.graph.erase_node(node)
        if any(_has_dtype((node.args, node.kwargs)) for node in self.graph.nodes):
            self.conditions.dtypes = True
        self.conditions.reads = list(self._reads.values())
        return spec

    # ------------------------------------------------------------------ Python values -> nodes

    def _track(self, tensor: Tensor, node: fx.Node) -> None:
        # The tensor is kept, so that no other one gets its id.
        self._values[id(tensor)] = (tensor, node)
        node.meta.update(val=tensor, requires_grad=tensor.requires_grad, storage=storage(tensor))

    def argument(self, value: Any) -> Any:
        """What stands for ``value`` in the arguments of a node."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, SIZES):
            return self._size(value)
        if isinstance(value, torch.device):
            return self._device(value)
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is dict:
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, (*CONSTANTS, range, type(...), torch.finfo, torch.Generator)):
            return value
        if callable(value) and not isinstance(value, nn.Module):
            return value
        if _tensors_in(value):
            # a registered container, such as a transformers output: made anew in the graph
            leaves, spec = pytree.tree_flatten(value)
            return self.graph.call_function(Unflatten(spec), ([self.argument(leaf) for leaf in leaves],))
        raise self.refusal(
            f"a {type(value).__name__} is passed on, which a graph cannot hold",
            "for a key-value cache: use_cache=False",
        )

    def _tensor(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._values:
            return self._values[id(tensor)][1]
        if id(tensor) in self._attributes:
            return self._attribute(self._attributes[id(tensor)][1], tensor)
        raise self.refusal(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} is neither made here nor an input, parameter, buffer or "
            "attribute of this module (a closure, a global, or torch.func)",
            "pass it as an argument or register it as a buffer",
        )

    def _attribute(self, name: str, tensor: Tensor) -> fx.Node:
        if name not in self._attribute_nodes:
            with self.graph.inserting_before(self._first_operation()):
                node = self.graph.get_attr(name)
            node.meta.update(val=tensor, requires_grad=tensor.requires_grad, storage=storage(tensor))
            self._attribute_nodes[name] = node
        return self._attribute_nodes[name]

    def _first_operation(self) -> fx.Node:
        return next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)

    def _size(self, size: Any) -> Any:
        try:
            return self.sizes.build(size.node.expr)
        except UnknownSize as error:
            raise self.refusal(
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
                self.conditions.devices = True
                return device
        return self._devices[device]

    # ------------------------------------------------------------------ calls

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch function and record it."""
        name = getattr(function, "__name__", "")
        attribute = property_name(function)
        if attribute is not None:
            return self._property(attribute, function, args, kwargs)
        if name in _REFUSED:
            raise self.refusal(f"it calls {name}(): {_REFUSED[name]}")
        if name in _READ_VALUES:
            raise self._value_dependent(name)
        self._note_metadata(name, args)
        tensors = _tensors_in((args, kwargs))
        self._refuse_parameter_writes(name, tensors)
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        with self.session.spy.separately() as spy:
            try:
                result = self.session.outside(function, args, kwargs)
            except VALUE_DEPENDENT as error:
                raise self._value_dependent(name) from error
            is_random = spy.random
        if isinstance(result, SIZES) and free_unbacked_symbols(result):
            raise self._value_dependent(name)
        if not _tensors_in(result) and name != "__setitem__" and name not in _EFFECTS:
            return result
        with self.session.busy():
            op, target, node_args, node_kwargs = canonical(function, args, kwargs)
            node = self.graph.create_node(op, target, self.argument(node_args), self.argument(node_kwargs))
            self._after(node, [tensor for tensor, version in versions if tensor._version != version], is_random)
            if name in _EFFECTS:
                node.meta["effect"] = True
            if target is setitem:
                self._track(args[0], node)
            else:
                self._bind(result, node)
        return result

    def _property(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.__name__ != "__get__":
            raise self.refusal(f"it assigns to the attribute .{name} of a tensor")
        if name in ("grad", "_grad"):
            raise self.refusal("it reads .grad of a tensor, which is not known before a backward pass")
        value = self.session.outside(function, args, kwargs)
        self._note_metadata(name, args)
        if isinstance(value, Tensor):
            with self.session.busy():
                node = self.graph.call_function(getattr, (self.argument(args[0]), name))
                self._after(node, [], False)
                self._bind(value, node)
        return value

    def _note_metadata(self, name: str, args: tuple[Any, ...]) -> None:
        self.conditions.gradients |= name in _GRADIENTS
        self.conditions.dtypes |= name in _DTYPES
        self.conditions.devices |= name in ("is_cuda", "is_cpu", "get_device")
        known = self._attributes.get(id(args[0])) if args else None
        if known is not None and name in ("dtype", "requires_grad") and (known[1], name) not in self._reads:
            self.conditions.tensors.append((known[1], name, getattr(known[0], name)))

    def _refuse_parameter_writes(self, name: str, tensors: list[Tensor]) -> None:
        # Before it runs: a write to a real parameter would really happen.
        writes = name.endswith("_") and not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
        if writes and tensors and id(tensors[0]) in self._attributes and isinstance(tensors[0], nn.Parameter):
            raise self.refusal(f"it writes to its parameter {self._attributes[id(tensors[0])][1]!r}")

    def call_module(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child and record its call."""
        tensors = _tensors_in((args, kwargs))
        versions = [(tensor, tensor._version) for tensor in tensors]
        with self.session.busy():
            node = self.graph.call_module(path, self.argument(args), self.argument(kwargs))
        self.check_random_state()
        with self.session.spy.separately() as spy, self.session.suspended():
            result, outputs = self.session.run_leaf(module, args, kwargs)
            is_random = spy.random
        self._random_state = python_random.getstate()
        written = {id(tensor) for tensor, version in versions if tensor._version != version}
        leaves = pytree.tree_leaves((args, kwargs))
        if outputs is not None:
            written |= {id(leaves[place]) for place in outputs.mutated}
            is_random |= outputs.random
        with self.session.busy():
            self._after(node, [tensor for tensor in tensors if id(tensor) in written], is_random)
            self._bind(result, node)
            for tensor in _tensors_in(result):
                # sizes that only the outputs of children have
                if id(tensor) in self._values:
                    self.sizes.add_tensor(self._values[id(tensor)][1], tensor.shape)
        return result

    def call_product(self, linear: Any, path: str, x: Tensor) -> Tensor:
        """A decomposed linear: its product is one call, the addition of its bias another."""
        product = Product(path)
        with self.session.busy():
            result = product(self.module, x)
            node = self.graph.call_function(product, (next(iter(self.graph.nodes)), self._tensor(x)))
            self._after(node, [], False)
            self._bind(result, node)
        return result + linear.bias

    def _after(self, node: fx.Node, written: Iterable[Tensor], is_random: bool) -> None:
        node.meta.update(random=is_random, where=user_frame())
        mutates = [storage(tensor) for tensor in written]
        if mutates:
            node.meta["mutates"] = mutates

    def _bind(self, result: Any, node: fx.Node) -> None:
        """Nodes for a result; those of the items of a container are dropped later where nothing reads them."""
        if isinstance(result, Tensor):
            self._track(result, node)
        elif isinstance(result, SIZES):
            self.sizes.add_number(node, result)
        elif isinstance(result, tuple | list):
            for i, item in enumerate(result):
                self._bind_item(item, node, i)
        elif isinstance(result, dict):
            for key, item in result.items():
                self._bind_item(item, node, key)

    def _bind_item(self, item: Any, node: fx.Node, key: Any) -> None:
        if not (_tensors_in(item) or isinstance(item, SIZES)):
            return
        part = self.graph.create_node("call_function", operator.getitem, (node, key))
        self._after(part, [], False)
        part.meta["kind"] = "item"
        self._bind(item, part)

    def effect(self, function: Any, args: tuple[Any, ...]) -> fx.Node:
        """A call that is kept for what it does."""
        node = self.graph.call_function(function, args)
        self._after(node, [], False)
        node.meta["effect"] = True
        return node

    # ------------------------------------------------------------------ what Python relied on

    def read(self, path: str, name: str, value: Any) -> None:
        """The forward read the attribute ``name`` of one of its modules."""
        if (path, name) not in self._reads:
            self._reads[path, name] = Read(path, name, Snapshot.of(value))

    def check_side_effects(self) -> None:
        self.check_random_state()
        for (path, name), read in self._reads.items():
            if not read.holds(self.module):
                where = f"{path}.{name}".lstrip(".")
                raise self.refusal(f"it changes its attribute {where!r}, which a graph cannot repeat")

    def check_random_state(self) -> None:
        if python_random.getstate() != self._random_state:
            raise self.refusal("it draws from Python's random, which a graph cannot repeat", "use torch's generators")

    def size_condition(self, condition: Any, value: Any) -> None:
        self.conditions.sizes.append((condition, value, user_frame()))

    # ------------------------------------------------------------------ errors

    def refusal(self, found: str, hint: str = "") -> TraceError:
        text = f"{self.session.describe(self.module)} cannot be traced: {found}\n  at {user_frame()}"
        return TraceError(f"{text}\n  hint: {hint}" if hint else text)

    def _value_dependent(self, name: str) -> TraceError:
        return self.refusal(
            f"{name}() hands values of a tensor to Python, which may branch on them",
            "trace its parent, of which this module is a leaf, or keep the function that does so whole: trace(leaves=...)",
        )


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


def user_frame() -> str:
    """The innermost line of the user's (or transformers') code: ``file:line in function: text``."""
    frame = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        machinery = name.startswith(("partbook.core.", "torch.", "sympy.", "contextlib", "functools"))
        if not machinery and name != "torch" and not file.startswith("<"):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}: {line}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _tensors_of(module: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """Every tensor that the module or one below it holds: parameters, buffers, plain attributes."""
    found: dict[int, tuple[Tensor, str]] = {}
    for path, below in module.named_modules():
        for name, value in {**below._parameters, **below._buffers, **vars(below)}.items():
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                found.setdefault(id(value), (value, f"{path}.{name}".lstrip(".")))
    return found


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_dtype(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_dtype, tree.values()))
    if isinstance(tree, tuple | list):
        return any(map(_has_dtype, tree))
    return isinstance(tree, torch.dtype)
