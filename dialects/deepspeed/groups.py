"""The user's parameter groups: what an optimizer, and the scheduler of its learning rates, hold of a rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from partbook.core import Schedule, ScheduledModel
from partbook.core.pipeline import holdings_of, pipeline_of, subtree

# What torch's schedulers (2.13) keep of each group of their optimizer, in its order.
_OF_EACH_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}


def check_groups(trial: Schedule, model: nn.Module, known: Any) -> None:
    """Parameters that a schedule makes one must be in one group of the user's optimizer, which has no state yet."""
    if isinstance(known, Optimizer) and any(known.state.values()):
        raise ValueError("the optimizer has made steps already: its state has the shapes of the whole parameters")
    groups = {id(p): i for i, group in enumerate(_groups(known)) for p in group["params"]}
    named = dict(model.named_parameters())
    for name, expression in trial.state.weights.items():
        held = {groups.get(id(named[source])) for source in expression.names()}
        if groups and len(held) > 1:
            raise ValueError(
                f"{', '.join(expression.names())} become one parameter {name}, but are in different groups of the "
                "optimizer\n  hint: put them in one group, or do not fuse them"
            )


def check_groups_of_stages(trial: Schedule, model: nn.Module, known: Any, config: Mapping[str, Any]) -> None:
    """Every stage must have something to train; under ZeRO and fp16, of each group.

    DeepSpeed's optimizers refuse to hold nothing, on one rank, while the others begin; and those add up the norm of
    one group after the other over the stages (runtime/zero/stage_1_and_2.py, 0.19), so they wait for each other's.
    """
    state = trial.state
    if not state.cuts:
        return
    named, cuts = dict(model.named_parameters()), f"move the cuts, which are after {', '.join(state.cuts)}"
    groups = {id(p): i for i, group in enumerate(_groups(known)) for p in group["params"] if p.requires_grad}
    all_groups = set(groups.values())
    needs_all = config.get("zero_optimization", {}).get("stage", 0) > 0 or config.get("fp16", {}).get("enabled", False)
    for stage, held in enumerate(holdings_of(pipeline_of(state), state.model)):
        trained = [p for p in subtree(state.model, held).parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                f"stage {stage} has no parameter that is trained, and DeepSpeed's optimizers cannot hold none\n"
                f"  hint: {cuts}"
            )
        sources = {source for p in trained for source in state.weights[state.canonical(p)].names()}
        missing = all_groups - {groups.get(id(named[source])) for source in sources}
        if needs_all and missing:
            raise ValueError(
                f"stage {stage} has no parameter of group {min(missing)} of the optimizer, and under ZeRO or fp16 "
                f"DeepSpeed needs the same groups on every stage\n  hint: ZeRO 0, or groups of which each stage has "
                f"parts; or {cuts}"
            )


def exchange(holders: Iterable[Any], after: Mapping[int, nn.Parameter], elsewhere: set[int]) -> None:
    """Give lists of parameters or groups, and optimizers, the new parameters: ``after`` by the id of the old ones.

    Those that other stages hold (``elsewhere``) leave, and so do groups that have no others; a learning-rate scheduler
    forgets these groups too.
    """
    dropped: dict[int, list[int]] = {}
    for holder in holders:
        if isinstance(holder, LRScheduler | ReduceLROnPlateau):
            _forget(holder, dropped.get(id(holder.optimizer), []))
        elif isinstance(holder, list) and holder and not isinstance(holder[0], dict):
            holder[:] = _distinct(after.get(id(p), p) for p in holder if id(p) not in elsewhere)
        else:
            groups = _groups(holder)
            for group in groups:
                group["params"] = _distinct(after.get(id(p), p) for p in group["params"] if id(p) not in elsewhere)
            dropped[id(holder)] = [i for i, group in enumerate(groups) if not group["params"]]
            groups[:] = [group for group in groups if group["params"]]


def _forget(scheduler: Any, groups: list[int]) -> None:
    for name in _OF_EACH_GROUP & vars(scheduler).keys():
        values = getattr(scheduler, name)
        if isinstance(values, list):
            setattr(scheduler, name, [value for i, value in enumerate(values) if i not in groups])
    for inner in getattr(scheduler, "_schedulers", ()):
        _forget(inner, groups)


def for_groups_here(saved: Mapping[str, Any], own: Mapping[str, Any], groups: Iterable[Any]) -> dict[str, Any]:
    """The ``saved`` state of a scheduler for a rank with other parameter groups, whose state is ``own`` so far."""
    groups = list(groups)
    found = {name: own.get(name) if name in _OF_EACH_GROUP else value for name, value in saved.items()}
    if "_last_lr" in found:
        found["_last_lr"] = [group["lr"] for group in groups]
    if "_schedulers" in found:
        pairs = zip(saved["_schedulers"], own["_schedulers"], strict=True)
        found["_schedulers"] = [for_groups_here(one, other, groups) for one, other in pairs]
    return found


def names_of_groups(engine: Any, scheduled: ScheduledModel) -> list[list[str]]:
    """The names of the parameters in each group of the engine's optimizer, which may hold flat copies of them."""
    names = {id(parameter): name for name, parameter in scheduled.model.named_parameters()}
    groups = [group["params"] for group in engine.optimizer.param_groups]
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(engine.optimizer, attribute, groups)
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _groups(known: Any) -> list[dict[str, Any]]:
    if isinstance(known, Optimizer):
        return known.param_groups
    if isinstance(known, list) and known:
        return known if isinstance(known[0], dict) else [{"params": known}]
    return []


def _distinct(parameters: Iterable[Any]) -> list[Any]:
    return list({id(parameter): parameter for parameter in parameters}.values())
