"""Stages of plain modules: values that live long, modules that are called twice, writes, modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipelines
from partbook.core import GuardError, Mesh, build, run_in_order
from partbook.core.pipeline import share, subtree
from pipelines import Linears as Base
from pipelines import Nested, Skip, X


class ThreeReaders(Base):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        second = self.b(first) * first
        third = self.c(second) * first
        return self.d(third) * first


class CalledTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x)).relu())


class NoParameters(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Several(Base):
    """A tuple of tensors, one of which the first stage makes; a size, a constant."""

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        second = self.b(first)
        return second, {"first": first, "more": (self.c(second), None, 3)}, x.shape[0]


class Direct(Base):
    """Parameters and a buffer that forward reads itself, early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4) * 1.5), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * self.scale) + self.table
        return self.b(x) * self.scale + self.shift + self.table


class Written(Base):
    """Item assignment and an alias that is written to: what is made again stands for what was written."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 4)
        alias = mask[1:]
        mask[0] = 2.0
        alias.add_(1.0)
        return self.c(self.b(self.a(x) * mask) * mask)


class Noise(Base):
    """Random numbers are drawn once and cross: made again they would be others."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        return self.b(self.a(x) * noise) * noise


class WithoutGradient(Base):
    """A block of no_grad whose result crosses, and a mode around what is made again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.a(x)
            constant = x.sin()
        return (self.b(self.c(x)) - target) * constant


class Frozen(Base):
    """Nothing before the cut needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Helper(nn.Module):
    """Without parameters, but it counts its calls, which no graph can: it stays whole, and its result crosses."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class WithHelper(Base):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.helper(x)
        return self.b(self.a(x)) + doubled


class Integers(Base):
    """An index that depends on values crosses as integers."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        best = first.argmax(dim=-1)
        return self.c(self.b(first)).gather(1, best[:, None])


CASES = [
    (Skip, ("a", "b")),
    (Skip, ("a", "b", "c")),
    (ThreeReaders, ("a", "b", "c")),
    (CalledTwice, ("b",)),
    (NoParameters, ("a", "act")),
    (Several, ("a", "b")),
    (Direct, ("a",)),
    (Written, ("a", "b")),
    (WithoutGradient, ("c",)),
    (Frozen, ("a",)),
    (WithHelper, ("a",)),
    (Nested, ("rows.0.1", "rows.1.0", "last.0")),
    (Integers, ("a", "b")),
]


@pytest.mark.parametrize(("cls", "cuts"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_stages_compute_what_the_module_does(cls: type[nn.Module], cuts: tuple[str, ...]) -> None:
    model = cls()
    scheduled = pipelines.cut(copy.deepcopy(model), *cuts, inputs=X)
    assert len(scheduled.stages) == len(cuts) + 1
    pipelines.assert_same(scheduled, model, X)
    other = {"x": torch.randn(5, 4)}
    pipelines.assert_same(scheduled, model, other)
    assert len(scheduled.pipeline.wirings) == 1


def names(scheduled: Any) -> list[list[tuple[str, bool]]]:
    return [[(name, gradient) for name, _, _, gradient in one] for one in pipelines.crossing(scheduled)]


def test_a_value_crosses_until_its_last_reader() -> None:
    assert [len(one) for one in names(pipelines.cut(Skip(), "a", "b", "c", inputs=X))] == [1, 2, 2]
    assert [len(one) for one in names(pipelines.cut(ThreeReaders(), "a", "b", "c", inputs=X))] == [1, 2, 2]


def test_random_numbers_cross_and_constants_do_not() -> None:
    noise = pipelines.cut(Noise(), "a", inputs=X)
    (crossing,) = names(noise)
    assert ("rand_like", False) in crossing
    eager = Noise()
    torch.manual_seed(3)
    found = run_in_order(noise, **X)
    torch.manual_seed(3)
    assert torch.equal(found, eager(**X))
    (crossing,) = names(pipelines.cut(WithoutGradient(), "c", inputs=X))
    # the target of the frozen pass; not the sine of the input
    assert sorted(gradient for _, gradient in crossing) == [False, True]
    assert [len(one) for one in names(pipelines.cut(Written(), "a", "b", inputs=X))] == [1, 1]
    assert names(pipelines.cut(Frozen(), "a", inputs=X)) == [[("a", False)]]
    ((_, _, dtype, _),) = [v for v in pipelines.crossing(pipelines.cut(Integers(), "a", "b", inputs=X))[1] if not v[3]]
    assert dtype is torch.int64


def test_module_of_two_stages_is_a_tie() -> None:
    scheduled = build(pipelines.cut_schedule(CalledTwice(), "b", inputs=X, mesh=Mesh(pp=2, rank=1)))
    ties = {tie.name: tie.names for tie in scheduled.ties_across}
    # called on both sides of the cut; the stage ends after its other module
    assert ties == {"a.weight": {0: "a.weight", 1: "a.weight"}, "a.bias": {0: "a.bias", 1: "a.bias"}}
    assert scheduled.is_copy("a.weight")
    assert list(scheduled.model.state_dict()) == ["a.weight", "a.bias"]


def test_unused_tensors_are_held_once() -> None:
    model = Skip()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model.extra = nn.Linear(2, 2)
    held = [
        set(
            build(
                pipelines.cut_schedule(copy.deepcopy(model), "a", inputs=X, mesh=Mesh(pp=2, rank=r))
            ).model.state_dict()
        )
        for r in range(2)
    ]
    assert held[0] | held[1] == set(model.state_dict())
    assert not held[0] & held[1]


def test_autocast_of_a_helper_holds_where_it_is_made_again() -> None:
    class Tables(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (x[:, None] @ x[..., None]).sin()

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.tables = Tables()

        def forward(self, x: Tensor) -> Tensor:
            table = self.tables(x)[..., 0]
            return self.b(self.a(x) * table) * table

    model = Model()
    scheduled = pipelines.cut(copy.deepcopy(model), "a", inputs=X)
    assert [len(one) for one in names(scheduled)] == [1]
    pipelines.assert_same(scheduled, model, X)


class PlainTensors(Base):
    """Tensors that are attributes, of the model and of a module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = torch.tensor(2.0), torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.scale + self.table) * self.scale + self.table


def test_tensors_that_are_plain_attributes() -> None:
    model = PlainTensors()
    scheduled = pipelines.cut(copy.deepcopy(model), "a", inputs=X)
    pipelines.assert_same(scheduled, model, X)
    owner = nn.Module()
    part = subtree(scheduled.model, scheduled.pipeline.held[1])
    share(owner, part)
    assert torch.equal(owner.scale, model.scale)
    assert torch.equal(owner.table, model.table)
    assert owner.b is part.b


def test_a_tensor_of_another_dtype_than_the_trace_has_does_not_cross() -> None:
    """The receiver would take its bytes for other numbers."""
    scheduled = pipelines.cut(Skip(), "a", inputs=X)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(GuardError, match=r"stage 0 sends, is torch.bfloat16, and was torch.float32 (.|\n)*autocast"),
    ):
        pipelines.run(scheduled, X)
