"""The attributes by which Megatron knows sharded, shared and sequence-parallel parameters; a missing one is silent."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from partbook.core import Problem, ScheduledModel, ScheduleError, user_line
from partbook.core.execution import change_plan, plan_of


def mark(scheduled: ScheduledModel, config: TransformerConfig) -> None:
    """Mark every parameter as Megatron's own layers mark theirs."""
    for name, parameter in scheduled.model.named_parameters():
        layout = scheduled.layouts.get(name)
        # The gradient norm counts a marked parameter on every tp rank, any other on the first one.
        is_counted = layout is not None and layout.is_first_replica(scheduled.mesh.tp_rank)
        _set(parameter, "tensor_model_parallel", is_counted)
        _set(parameter, "partition_dim", layout.axis if layout else -1)
        _set(parameter, "partition_stride", len(layout.segments) if layout else 1)
        _set(parameter, "allreduce", True)
    for tie in scheduled.ties_across:
        rank = scheduled.mesh.pp_rank
        if rank in tie.names:
            parameter = scheduled.model.get_parameter(tie.names[rank])
            # Of its own bucket in the distributed optimizer.
            _set(parameter, "shared_embedding", True)
            if rank != tie.ranks[0]:
                # Not counted in the gradient norm again.
                _set(parameter, "shared", True)
    for name in _embeddings(scheduled):
        _set(scheduled.model.get_parameter(name), "is_embedding_or_output_parameter", True)
    for parameter in _used_twice(scheduled.model):
        # Fused gradient accumulation leaves garbage in .grad, to which another use would add its own.
        _set(parameter, "zero_out_wgrad", True)
    if config.sequence_parallel:
        _mark_sequence(scheduled)


def _embeddings(scheduled: ScheduledModel) -> list[str]:
    """The present names, on this rank, of the weights of embedding and head."""
    skeleton: Any = scheduled.original.skeleton
    found = [getattr(skeleton, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    ids = {id(module.weight) for module in found if module is not None}
    originals = {name for name, parameter in skeleton.named_parameters() if id(parameter) in ids}
    return [name for name, expression in scheduled.weights.items() if not originals.isdisjoint(expression.names())]


def _used_twice(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that several modules of this rank have."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return [parameter for parameter in model.parameters() if seen[id(parameter)] > 1]


def _mark_sequence(scheduled: ScheduledModel) -> None:
    """Leave gradients that each tp rank has a part of to Megatron, which sums those of all of them at once."""
    tp = scheduled.mesh.tp
    for module in scheduled.model.modules():
        plan = plan_of(module)
        if plan is None or not plan.partial_gradients:
            continue
        ours = {}
        for name, sharers in plan.partial_gradients.items():
            if sharers == tp:
                _set(module.get_parameter(name), "sequence_parallel", True)
            else:
                ours[name] = sharers
        change_plan(module, plan.mesh, partial_gradients=ours)


def _set(parameter: Tensor, name: str, value: Any) -> None:
    setattr(parameter, name, value)


def check_ties(scheduled: ScheduledModel) -> None:
    """Raise ScheduleError for ties between stages that Megatron does not sum the gradients of."""
    ends = [0, len(scheduled.stages) - 1]
    names = dict.fromkeys(name for stage in scheduled.stages for name in stage.parameters)
    held = {name: [stage.index for stage in scheduled.stages if name in stage.parameters] for name in names}
    shared = {name: stages for name, stages in held.items() if len(stages) > 1}
    problems = [
        Problem(
            f"{name!r} is held by the stages {stages}, and Megatron sums gradients over the first and the last only",
            "move the cuts so that these two hold it, or one stage does",
        )
        for name, stages in shared.items()
        if stages != ends
    ]
    if len(shared) > 1:
        listed = ", ".join(map(repr, shared))
        problems.append(Problem(f"several parameters are held by two stages: {listed}, and Megatron sums one of them"))
    if problems:
        raise ScheduleError("model_provider", problems, user_line())
