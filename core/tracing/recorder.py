"""Recording one forward: every torch call of the module's own Python becomes a node, every child a ``call_module``."""

from __future__ import annotations

import linecache
import operator
import random as python_random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..errors import TraceError
from .canon import canonical, property_name, setitem
from .kind import CONSTANTS, Argument, Conditions, Leaf, first_dtype
from .outputs import VALUE_DEPENDENT, storage
from .product import Product
from .snapshot import Read, Snapshot
from .symbols import SIZES, Sizes
from .values import Values, tensors_in

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
    """One recorded forward: its graph, the look of arguments and result, and the conditions under which it holds."""

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
        self.conditions = Conditions(parameter=first_dtype(module))
        self.sizes = Sizes(self.graph, session.shapes.replace)
        self.graph.placeholder("self")
        self.values = Values(self.graph, module, self.sizes, self.refusal)
        self.paths: dict[int, str] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(child), path)
        self._tensors = {id(below): _own_tensors(below) for below in module.modules()}
        self._reads: dict[tuple[str, str], Read] = {}
        self._random_state = _python_random()

    # ------------------------------------------------------------------ inputs and outputs

    def inputs(self, given: dict[str, Any]) -> list[Argument]:
        """Placeholders for the tensors and sizes of the arguments."""
        arguments: list[Argument] = []
        first: dict[int, str] = {}
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
            self.values.track(leaf, node)
            node.meta["is_leaf"] = leaf.is_leaf
            return Leaf(node.name)
        if isinstance(leaf, torch.SymInt):
            node = self.graph.placeholder(where)
            node.meta.update(size=leaf.node.expr, kind="sym")
            self.sizes.add_number(node, leaf)
            return Leaf(node.name, is_size=True)
        if isinstance(leaf, CONSTANTS):
            return Leaf(constant=leaf)
        raise self.refusal(
            f"the argument {name!r} is a {type(leaf).__name__}; known are tensors, constants and containers of them",
            "for a key-value cache: use_cache=False",
        )

    def output(self, result: Any) -> pytree.TreeSpec:
        """The output node; the nodes that nothing needs are dropped."""
        leaves, spec = pytree.tree_flatten(result, is_leaf=lambda x: isinstance(x, torch.Size))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, torch.Size, *SIZES, *CONSTANTS)):
                raise self.refusal(
                    f"it returns a {type(leaf).__name__}, which a graph cannot hold",
                    "for a key-value cache: use_cache=False",
                )
        self.check_side_effects()
        self.graph.output([self._leaving(leaf) for leaf in leaves])
        for node in reversed(list(self.graph.nodes)):
            kept = node.users or node.op in ("placeholder", "output", "call_module")
            if not (kept or node.meta.get("mutates") or node.meta.get("effect")):
                self.graph.erase_node(node)
        if any(_has_dtype((node.args, node.kwargs)) for node in self.graph.nodes):
            self.conditions.dtypes = True
        self.conditions.devices |= self.values.has_fixed_device
        self.conditions.reads = list(self._reads.values())
        return spec

    def _leaving(self, leaf: Any) -> Any:
        node = self.values.node_for(leaf)
        return self.graph.call_function(torch.Size, (node,)) if isinstance(leaf, torch.Size) else node

    # ------------------------------------------------------------------ calls

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None) -> Any:
        """Run one torch function and record it; ``run``: what gives the result of a function that stays whole."""
        name = getattr(function, "__name__", "")
        attribute = property_name(function)
        if attribute is not None:
            return self._property(attribute, function, args, kwargs)
        if name in _REFUSED:
            raise self.refusal(f"it calls {name}(): {_REFUSED[name]}")
        if name in _READ_VALUES:
            raise self._value_dependent(name)
        self._note_metadata(name, args)
        tensors = tensors_in((args, kwargs))
        self._refuse_parameter_writes(name, tensors)
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        with self.session.spy.separately() as spy:
            try:
                result = self.session.outside(run or function, args, kwargs)
            except VALUE_DEPENDENT as error:
                raise self._value_dependent(name) from error
            is_random = spy.random
        if isinstance(result, SIZES) and free_unbacked_symbols(result):
            raise self._value_dependent(name)
        if not tensors_in(result) and name != "__setitem__" and name not in _EFFECTS:
            return result
        written = [tensor for tensor, version in versions if tensor._version != version]
        if not written and any(result is tensor for tensor in tensors):
            # Nothing happened here, as x.float() of a float32 gives x itself; for another dtype there will be two.
            result = self.session.outside(torch.ops.aten.alias.default, (result,), {})
        with self.session.busy():
            op, target, node_args, node_kwargs = canonical(function, args, kwargs)
            node = self.graph.create_node(
                op, target, self.values.node_for(node_args), self.values.node_for(node_kwargs)
            )
            self._after(node, written, is_random)
            if name in _EFFECTS:
                node.meta["effect"] = True
            if target is setitem:
                self.values.track(args[0], node)
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
                node = self.graph.call_function(getattr, (self.values.node_for(args[0]), name))
                self._after(node, [], False)
                self._bind(value, node)
        return value

    def _note_metadata(self, name: str, args: tuple[Any, ...]) -> None:
        self.conditions.gradients |= name in _GRADIENTS
        self.conditions.dtypes |= name in _DTYPES
        self.conditions.devices |= name in ("is_cuda", "is_cpu", "get_device")
        self.conditions.layouts |= name in ("is_contiguous", "view_as_real", "is_non_overlapping_and_dense")
        if name in ("stride", "storage_offset"):
            raise self.refusal(f"it reads {name}() of a tensor, which other callers may lay out differently")
        known = self.values.attribute_name(args[0]) if args else None
        if known is not None and name in ("dtype", "requires_grad"):
            self.conditions.tensors.append((known, name, getattr(args[0], name)))

    def _refuse_parameter_writes(self, name: str, tensors: list[Tensor]) -> None:
        # Before it runs: a write to a real parameter would really happen.
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
        if writes and tensors and isinstance(tensors[0], nn.Parameter):
            raise self.refusal(f"it writes to its parameter {self.values.attribute_name(tensors[0])!r}")

    def call_module(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child and record its call."""
        tensors = tensors_in((args, kwargs))
        versions = [(tensor, tensor._version) for tensor in tensors]
        with self.session.busy():
            node = self.graph.call_module(path, self.values.node_for(args), self.values.node_for(kwargs))
        self.check_random_state()
        if any(_own_tensors(below) != self._tensors[id(below)] for below in module.modules()):
            raise self.refusal(f"it calls {path!r} with other weights than its own (torch.func.functional_call)")
        self.note_containers(path)
        with self.session.spy.separately() as spy, self.session.suspended():
            result, outputs = self.session.run_leaf(module, args, kwargs)
            is_random = spy.random
        self._random_state = _python_random()
        written = {id(tensor) for tensor, version in versions if tensor._version != version}
        leaves = pytree.tree_leaves((args, kwargs))
        if outputs is not None:
            written |= {id(leaves[place]) for place in outputs.mutated}
            is_random |= outputs.random
        with self.session.busy():
            self._after(node, [tensor for tensor in tensors if id(tensor) in written], is_random)
            self._bind(result, node)
            for tensor in tensors_in(result):
                # sizes that only the outputs of children have
                known = self.values.known(tensor)
                if known is not None:
                    self.sizes.add_tensor(known, tensor.shape)
        return result

    def note_containers(self, path: str) -> None:
        names = path.split(".")
        for i in range(1, len(names)):
            container = ".".join(names[:i])
            self.conditions.containers[container] = tuple(self.module.get_submodule(container)._modules)

    def call_product(self, linear: Any, path: str, x: Tensor) -> Tensor:
        """A decomposed linear: its product is one call, the addition of its bias another."""
        product = Product(path)
        with self.session.busy():
            result = product(self.module, x)
            node = self.graph.call_function(product, (next(iter(self.graph.nodes)), self.values.tensor(x)))
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
            self.values.track(result, node)
        elif isinstance(result, SIZES):
            self.sizes.add_number(node, result)
        elif isinstance(result, tuple | list):
            for i, item in enumerate(result):
                self._bind_item(item, node, i)
        elif isinstance(result, dict):
            for key, item in result.items():
                self._bind_item(item, node, key)

    def _bind_item(self, item: Any, node: fx.Node, key: Any) -> None:
        if not (tensors_in(item) or isinstance(item, SIZES)):
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

    def read(self, path: str, name: str, value: Any, of_class: bool) -> None:
        """The forward read the attribute ``name`` of one of its modules."""
        if (path, name) not in self._reads:
            self._reads[path, name] = Read(path, name, Snapshot.of(value), of_class)

    def check_side_effects(self) -> None:
        self.check_random_state()
        for (path, name), read in self._reads.items():
            value = getattr(self.module.get_submodule(path), name, None)
            read = self._reads[path, name] = replace(read, value=read.value.settled(value))
            if not read.holds(self.module):
                where = f"{path}.{name}".lstrip(".")
                raise self.refusal(f"it changes its attribute {where!r}, which a graph cannot repeat")

    def check_random_state(self) -> None:
        if _python_random() != self._random_state:
            raise self.refusal(
                "it draws from Python's or numpy's random, which a graph cannot repeat", "use torch's generators"
            )

    def size_condition(self, condition: Any, value: Any) -> None:
        self.conditions.sizes.append((condition, value, user_frame()))

    # ------------------------------------------------------------------ errors

    def refusal(self, found: str, hint: str = "") -> TraceError:
        text = f"{self.session.describe(self.module)} cannot be traced: {found}\n  at {user_frame()}"
        return TraceError(f"{text}\n  hint: {hint}" if hint else text)

    def _value_dependent(self, name: str) -> TraceError:
        return self.refusal(
            f"{name}() hands values of a tensor to Python, which may branch on them",
            "trace its parent, of which this module is a leaf, or keep the function that does so: trace(leaves=...)",
        )


def _own_tensors(module: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())]


def _python_random() -> Any:
    """The states of the generators that are not torch's."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return python_random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


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


def _has_dtype(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_dtype, tree.values()))
    if isinstance(tree, tuple | list):
        return any(map(_has_dtype, tree))
    return isinstance(tree, torch.dtype)
