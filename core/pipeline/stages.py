"""Which stage holds which modules and tensors, and the part of the model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .pipeline import Pipeline
from .split import Part


@dataclass(frozen=True)
class Stage:
    """One piece of the model between two cuts.

    ``module`` has its modules under their original paths (with those of the other stages of this rank); None where the
    stage is another rank's. ``parameters`` are names in the model, the first one of a tied parameter.
    """

    index: int
    module: nn.Module | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class StageTie:
    """An original parameter ``name`` that several pipeline ranks hold: rank -> its name in that rank's module."""

    name: str
    names: dict[int, str]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.names)


@dataclass(frozen=True)
class Holding:
    """Paths of modules, and names of tensors outside of them."""

    modules: frozenset[str]
    tensors: frozenset[str]

    def has(self, path: str) -> bool:
        names = path.split(".")
        return path in self.tensors or any(".".join(names[:i]) in self.modules for i in range(1, len(names) + 1))

    def has_part(self, part: Part) -> bool:
        return all(map(self.has, (*part.modules, *part.tensors)))

    def __or__(self, other: Holding) -> Holding:
        return Holding(self.modules | other.modules, self.tensors | other.tensors)


class Fragment(nn.Module):
    """Stands where the model has a module of which a rank holds a part."""


def holdings_of(pipeline: Pipeline, model: nn.Module) -> list[Holding]:
    """What each stage holds. Tensors that no stage uses go with those that precede them in the model."""
    parts = pipeline.wirings[0].parts
    held = [Holding(frozenset(part.modules), frozenset(part.tensors)) for part in parts]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    used = {id(tensor) for name, tensor in named if any(holding.has(name) for holding in held)}
    stage = 0
    for name, tensor in named:
        stages = [i for i, holding in enumerate(held) if holding.has(name)]
        if stages:
            stage = stages[0]
        elif id(tensor) not in used:
            held[stage] = Holding(held[stage].modules, held[stage].tensors | {name})
    return held


def subtree(model: nn.Module, holding: Holding) -> nn.Module:
    """The modules and tensors of ``holding`` under their paths, in the order of the model."""
    tree = Fragment()
    for path, module in model.named_modules(remove_duplicate=False):
        if path in holding.modules and not holding.has(path.rpartition(".")[0]):
            parent, name = _parent(tree, path)
            parent.add_module(name, module)
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *_plain_tensors(module)):
            full_name = f"{path}.{name}".lstrip(".")
            if full_name in holding.tensors and tensor is not None:
                _add_tensor(_parent(tree, full_name)[0], name, tensor, module)
    return tree


def share(owner: nn.Module, stage: nn.Module) -> None:
    """Give ``owner``, a runtime's module for a stage, the stage's modules and tensors under the same names."""
    # The registries themselves: what is put into the stage later is the owner's too.
    for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        owner.__dict__[registry] = stage.__dict__[registry]
    owner.__dict__.update(_plain_tensors(stage))


def _parent(tree: nn.Module, path: str) -> tuple[nn.Module, str]:
    *names, last = path.split(".")
    for name in names:
        if name not in tree._modules:
            tree.add_module(name, Fragment())
        tree = tree._modules[name]  # type: ignore[assignment]
    return tree, last


def _plain_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]


def _add_tensor(owner: nn.Module, name: str, tensor: Tensor, original: nn.Module) -> None:
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    elif name in original._buffers:
        owner.register_buffer(name, tensor, persistent=name not in original._non_persistent_buffers_set)
    else:
        setattr(owner, name, tensor)


def ties_of(model: nn.Module, holdings: Sequence[Holding]) -> tuple[StageTie, ...]:
    """The parameters that more than one of ``holdings`` has, one of them a pipeline rank's."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, dict[int, str]] = {}
    for rank, holding in enumerate(holdings):
        for name, parameter in subtree(model, holding).named_parameters():
            owners.setdefault(id(parameter), {})[rank] = name
    return tuple(StageTie(name, owners[i]) for i, name in first.items() if len(owners.get(i, ())) > 1)


def shared_buffers(model: nn.Module, holdings: Sequence[Holding]) -> list[str]:
    """Saved buffers that more than one of ``holdings`` has: what one writes to them the others would not see."""
    found = []
    for path, module in model.named_modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            full_name = f"{path}.{name}".lstrip(".")
            if sum(holding.has(full_name) for holding in holdings) > 1:
                found.append(full_name)
    return found


def release(model: nn.Module, kept: nn.Module) -> None:
    """Free the parameters of ``model`` that ``kept``, a part of it, does not hold: they become meta tensors."""
    held = {id(parameter) for parameter in kept.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in held and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
