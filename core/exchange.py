"""Parameters in place of others: a mapping checked, its tensors made, the weight map kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from .errors import Problem, did_you_mean
from .state import State, evaluate
from .weights import Expression, Source, as_expression


class Exchange:
    """The ``old`` parameters, by the names that the mapping uses, give way to those of ``new``.

    A parameter of ``new`` that is not in the mapping is the old one of the same name and shape; such a parameter stays
    the same object, ties included. Every old parameter must be used exactly once: nothing is lost.
    """

    def __init__(
        self, old: Mapping[str, nn.Parameter], new: nn.Module, mapping: Mapping[str, Expression | str] | None
    ) -> None:
        self.old, self.new = dict(old), new
        self._new = dict(new.named_parameters())
        self._given = {name: as_expression(value) for name, value in (mapping or {}).items()}
        same = {
            name: Source(name)
            for name, parameter in self._new.items()
            if name not in self._given and name in self.old and self.old[name].shape == parameter.shape
        }
        every: dict[str, Expression] = {**self._given, **same}
        self.expressions = {name: every[name] for name in [*self._new, *self._given] if name in every}

    def problems(self, outside: set[int]) -> Iterator[Problem]:
        """``outside``: the ids of the parameters of the rest of the model."""
        problems = list(self._check_names())
        yield from problems or self._check_tensors(outside)

    def _check_names(self) -> Iterator[Problem]:
        for name, expression in self.expressions.items():
            if name not in self._new:
                yield Problem(f"the mapping fills {name!r}, which the new module lacks", did_you_mean(name, self._new))
            for source in expression.names():
                if source not in self.old:
                    yield Problem(
                        f"{name!r} is made of {source!r}, which does not exist", did_you_mean(source, self.old)
                    )
        for name in self._new:
            if name not in self.expressions:
                yield Problem(f"nothing says what {name!r} of the new module is made of", "add it to the mapping")
        used = [source for expression in self.expressions.values() for source in expression.names()]
        for name in self.old:
            if used.count(name) != 1:
                yield Problem(f"the weights of {name!r} are used {used.count(name)} times", "every one exactly once")

    def _check_tensors(self, outside: set[int]) -> Iterator[Problem]:
        shapes = {name: tuple(parameter.shape) for name, parameter in self.old.items()}
        for name, expression in self.expressions.items():
            wanted = tuple(self._new[name].shape)
            try:
                made = expression.shape(shapes)
            except ValueError as error:
                yield Problem(f"{name!r}: {error}")
                continue
            if made != wanted:
                yield Problem(f"{name!r} is {list(wanted)}, but its weights make {list(made)}")
            if not isinstance(expression, Source):
                tied = [source for source in expression.names() if id(self.old[source]) in outside]
                if tied:
                    yield Problem(f"{', '.join(tied)} is tied to a parameter outside and would come apart")
        first: dict[int, str] = {}
        for name, parameter in self.old.items():
            if first.setdefault(id(parameter), name) != name:
                yield Problem(f"{name!r} is tied to {first[id(parameter)]!r} and would come apart")

    def fill(self, state: State) -> None:
        """Give ``new`` its parameters; ``settle`` comes after it has its place in the model."""
        self._full_names = {name: state.canonical(parameter) for name, parameter in self.old.items()}
        self._made: dict[str, nn.Parameter] = {}
        for name, expression in self.expressions.items():
            if isinstance(expression, Source):
                self._made[name] = self.old[expression.name]
            else:
                sources = [self.old[source] for source in expression.names()]
                tensor = evaluate(expression, {n: p.detach() for n, p in self.old.items()})
                self._made[name] = nn.Parameter(
                    tensor.contiguous(), requires_grad=any(p.requires_grad for p in sources)
                )
        for name, parameter in self._made.items():
            module, _, leaf = name.rpartition(".")
            self.new.get_submodule(module)._parameters[leaf] = parameter

    def settle(self, state: State) -> None:
        """Enter the new parameters into the weight map in the place of the old ones."""
        state.structure_changed()
        entries = {name: state.weights.pop(full) for name, full in self._full_names.items()}
        for name, expression in self.expressions.items():
            full = state.canonical(self._made[name])
            state.weights[full] = expression.substitute(entries)
            notes = [state.annotations.pop(self._full_names[source], None) for source in expression.names()]
            if isinstance(expression, Source) and notes[0]:
                state.annotations[full] = notes[0]
        order = {name: i for i, (name, _) in enumerate(state.model.named_parameters())}
        state.weights = dict(sorted(state.weights.items(), key=lambda item: order[item[0]]))
        assert list(state.weights) == list(order)
