"""Sharded linears and embeddings become Megatron's parallel layers: the modules keep identity, path and weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Hashable, Iterator
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from partbook.core import ScheduledModel, is_tracing
from partbook.core.execution import Plan, Sync, change_plan, original_class, plan_of
from partbook.core.layout import Layout
from partbook.core.overlap import OverlappedColumn
from partbook.core.roles import is_linear, keeps_in_out, output_of
from partbook.core.weights import Transpose


class Column(ColumnParallelLinear):
    """A column-parallel product that is called as the linear was: x (..., in) -> (..., out/tp)."""

    def product(self, x: Tensor, with_bias: bool = True) -> Tensor:
        bias = self.bias if with_bias else None
        if is_tracing():
            return functional.linear(x, self.weight, bias)
        if bias is not None and not self.weight.requires_grad:
            # Megatron's product with a frozen weight has no gradient for the bias either.
            return self.product(x, with_bias=False) + bias
        self.skip_bias_add = not with_bias
        return ColumnParallelLinear.forward(self, x)[0]

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Row(RowParallelLinear):
    """A row-parallel product, summed over the ranks unless a sync of its plan does so; the plan adds the bias."""

    is_summed: bool

    def product(self, x: Tensor, with_bias: bool = False) -> Tensor:
        if is_tracing():
            return functional.linear(x, self.weight)
        if self.is_summed:
            return RowParallelLinear.forward(self, x)[0]
        return self._forward_impl(
            input=x,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
            grad_output_buffer=None,
        )

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class VocabularyEmbedding(VocabParallelEmbedding):
    """The rows of a vocabulary that this rank holds, looked up and summed over the ranks."""

    padding_idx: int | None
    vocabulary: int

    def product(self, ids: Tensor) -> Tensor:
        if is_tracing():
            return functional.embedding(ids, self.weight)
        # An id outside the vocabulary belongs to no rank: without this it would embed to zeros.
        torch._assert_async(
            ((ids >= 0) & (ids < self.vocabulary)).all(), f"a token id lies outside the vocabulary of {self.vocabulary}"
        )
        found = VocabParallelEmbedding.forward(self, ids)
        if self.padding_idx is None:
            return found
        # Its row takes no gradient, as in nn.Embedding.
        return torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)


def lower(scheduled: ScheduledModel, config: TransformerConfig) -> ScheduledModel:
    """The scheduled model with Megatron's layers in the place of its sharded linears and vocabulary embeddings.

    On one tp rank Megatron's layers have nothing to offer but their gradient accumulation; without it they are left.
    """
    if scheduled.mesh.tp == 1 and not config.gradient_accumulation_fusion:
        return scheduled
    names = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
    owners: dict[int, int] = {}
    for module in scheduled.model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    weights, layouts = dict(scheduled.weights), dict(scheduled.layouts)
    for module in list(scheduled.model.modules()):
        weight = module._parameters.get("weight")
        name = names.get(id(weight), "")
        layout = layouts.get(name)
        if layout is None or weight is None:
            continue
        if keeps_in_out(module):
            if owners[id(weight)] > 1:
                continue
            layout = layouts[name] = _transposed(layout)
            weights[name] = Transpose(weights[name])
            module._parameters["weight"] = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
        _lower(module, layout, scheduled, config)
    return dataclasses.replace(scheduled, weights=weights, layouts=layouts)


def _transposed(layout: Layout) -> Layout:
    return dataclasses.replace(layout, axis=1 - layout.axis, shape=layout.shape[::-1])


def _lower(module: nn.Module, layout: Layout, scheduled: ScheduledModel, config: TransformerConfig) -> None:
    mesh, plan = scheduled.mesh, plan_of(module) or Plan(scheduled.mesh)
    quiet = _for_construction(config)
    if is_linear(module):
        out_size, in_size = module.get_parameter("weight").shape
        bias = module._parameters.get("bias") is not None
        output = "split" if layout.axis == 0 else "partial"
    else:
        output = output_of(module, layout) or ""
    if is_linear(module) and output == "split":
        # Where several linears read one input, what contains them sums its gradient.
        sums = isinstance(plan.kernel, OverlappedColumn) or mesh.tp == 1
        with torch.device("meta"):
            layer: nn.Module = ColumnParallelLinear(
                in_size, out_size * mesh.tp, config=quiet, init_method=_nothing, bias=bias,
                disable_grad_reduce=not sums, tp_group=mesh.tp_group,
            )  # fmt: skip
        _become(module, Column, layer, plan, config)
    elif is_linear(module):
        with torch.device("meta"):
            layer = RowParallelLinear(
                in_size * mesh.tp, out_size, config=quiet, init_method=_nothing, bias=bias, input_is_parallel=True,
                skip_bias_add=True, tp_group=mesh.tp_group,
            )  # fmt: skip
        rest = _without_sum(plan)
        layer.is_summed = rest is not plan  # type: ignore[assignment]
        _become(module, Row, layer, dataclasses.replace(rest, deferred_bias=bias), config)
    elif isinstance(module, nn.Embedding) and output == "partial":
        rest = _without_sum(plan)
        if rest is plan and mesh.tp > 1:
            # Summed in another way, so looked up as before.
            return
        with torch.device("meta"):
            layer = VocabParallelEmbedding(
                layout.local_size() * mesh.tp, module.embedding_dim, init_method=_nothing, config=quiet,
                tp_group=mesh.tp_group,
            )  # fmt: skip
        layer.vocabulary = layout.shape[0]  # type: ignore[assignment]
        layer.padding_idx = module.padding_idx  # type: ignore[assignment]
        _become(module, VocabularyEmbedding, layer, rest, config)


def _for_construction(config: TransformerConfig) -> TransformerConfig:
    """Of layers whose weights are there already, and whose sequence is gathered and scattered around them."""
    quiet = copy.copy(config)
    quiet.perform_initialization, quiet.use_cpu_initialization, quiet.sequence_parallel = False, True, False
    return quiet


def _nothing(_: Tensor) -> None: ...


def _without_sum(plan: Plan) -> Plan:
    """The plan without the all-reduce of its output, which the layer does; the same one where it has none."""
    kept: list[Sync] = list(plan.syncs)
    for sync in plan.syncs:
        if sync.mode == "fwd_post" and sync.op == "all_reduce":
            kept.remove(sync)
            return dataclasses.replace(plan, syncs=tuple(kept))
    return plan


def _become(module: nn.Module, cls: type[nn.Module], layer: nn.Module, plan: Plan, config: TransformerConfig) -> None:
    """Make ``module`` an instance of ``cls`` as ``layer`` is, with its own parameters, hooks and further methods."""
    own = {name for name in vars(nn.Module()) if name.startswith("_")} | {"training"}
    module.__dict__.update({name: value for name, value in vars(layer).items() if name not in own})
    module.__dict__["config"] = config
    if "weight" in plan.partial_gradients:
        # Its gradient is summed over the ranks that hold it on its way to .grad, which fused accumulation goes around.
        module.__dict__["gradient_accumulation_fusion"] = False
    module.__dict__.pop("_partbook_plan", None)
    original = original_class(module)
    module.__class__ = _lowered_class(cast(Hashable, cls), cast(Hashable, original))
    changes = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "mesh"}
    change_plan(module, plan.mesh, **{**changes, "kernel": cls.product})  # type: ignore[attr-defined]


@functools.cache
def _lowered_class(cls: Any, original: Any) -> Any:
    names = {"__module__": original.__module__, "__doc__": original.__doc__, "__qualname__": original.__qualname__}
    return type(original.__name__, (cls, original), names)


def parallel_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those of a model that are Megatron's."""
    kinds = (Column, Row, VocabularyEmbedding)
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kinds))
