"""Stages of plain modules: values that live long, modules that are called twice, writes, modes, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipelines
from partbook.core import GuardError, Mesh, ScheduleError, build, create_schedule, run_in_order
from partbook.core.pipeline import refuse_unknown

X = {"x": torch.linspace(-1, 1, 12).view(3, 4)}


class Base(nn.Module):
    """Four linears of width 4, called by ``forward`` of each test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


class Skip(Base):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first).relu()) + first)


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


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            for linear in row:
                x = linear(x).tanh()
        return self.last(x)


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


class InNoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.b(self.a(x))
        return self.c(x)


class WritesLater(Base):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        first.mul_(2)
        return second + first


class WritesInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.b(self.a(x))


class PassesObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Unpack.call(self, Pack.call(self, x)))


class Box:
    def __init__(self, content: Tensor) -> None:
        self.content = content


class Pack(nn.Module):
    @staticmethod
    def call(owner: Any, x: Tensor) -> Box:
        return owner.pack(x)

    def forward(self, x: Tensor) -> Box:
        return Box(x + 1)


class Unpack(nn.Module):
    @staticmethod
    def call(owner: Any, box: Box) -> Tensor:
        return owner.unpack(box)

    def forward(self, box: Box) -> Tensor:
        return box.content


class WithObjects(PassesObject):
    def __init__(self) -> None:
        super().__init__()
        self.pack, self.unpack = Pack(), Unpack()
        self.pack.weight = nn.Parameter(torch.ones(1))
        self.unpack.weight = nn.Parameter(torch.ones(1))


class Norm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.b(self.a(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "cuts", "message"),
    [
        (InNoGrad, ("a",), "'a' ends inside a no_grad or autocast block"),
        (WritesLater, ("a",), "'a', which an earlier stage makes, is written to in place by stage 1"),
        (WritesInput, ("a",), "its input 'x' is written to in place"),
        (WithObjects, ("pack",), "a Box is passed on, which a graph cannot hold"),
        (Norm, ("a", "b"), "held by several stages"),
        (Outer, ("inner.a",), "hands values of a tensor to Python"),
        (Skip, ("d", "a"), "nothing happens after 'd' that would make a stage"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_cut_is_refused(model: type[nn.Module], cuts: tuple[str, ...], message: str) -> None:
    sch = pipelines.cut_schedule(model(), *cuts, inputs=X, mesh=Mesh(pp=len(cuts) + 1))
    before = sch.history.to_json(), {name: t.clone() for name, t in sch.module.state_dict().items()}
    with pytest.raises(ScheduleError) as refused:
        build(sch)
    assert message in str(refused.value)
    if model in (WritesLater, Outer):
        # the line
        assert "test_pipeline_plain.py" in str(refused.value)
    assert sch.history.to_json() == before[0]
    for name, tensor in sch.module.state_dict().items():
        assert torch.equal(tensor, before[1][name])


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("", X, "the model itself is no place for a cut"),
        ("a", X, "a stage ends here already"),
        ("b", {"x": torch.ones(2, 4)}, "other example inputs were given before"),
    ],
)
def test_refused_cut_changes_nothing(path: str, given: Any, message: str) -> None:
    sch = pipelines.cut_schedule(Skip(), "a", inputs=X)
    with pytest.raises(ScheduleError, match=message):
        sch[path].cut_pipeline_stage(inputs=given) if path else sch.cut_pipeline_stage(inputs=given)
    assert sch.state.cuts == ["a"]
    assert len(sch.history) == 1


def test_example_inputs_are_asked_for() -> None:
    sch = create_schedule(Skip(), Mesh(pp=2))
    with pytest.raises(ScheduleError, match=r"no example inputs are known for a Skip"):
        sch["a"].cut_pipeline_stage()
    with pytest.raises(ScheduleError, match=r"no example inputs are known for a Skip"):
        sch.cut_pipeline_stages()
    with pytest.raises(ScheduleError, match=r"0 places to cut are known"):
        sch.cut_pipeline_stages(inputs=X)
    with pytest.raises(ScheduleError, match="balanced by one of parameters, flops, time"):
        sch.cut_pipeline_stages(by="weight", inputs=X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda sch: sch["last"].checkpoint(), "'last' is checkpointed, and a stage ends inside it"),
        (lambda sch: sch["last"].fork_rng(), "'last' has a random stream of its own"),
    ],
)
def test_what_is_around_a_cut_must_be_divisible(prepare: Any, message: str) -> None:
    sch = create_schedule(Nested(), Mesh(pp=2, tp=2))
    prepare(sch)
    sch["last.0"].cut_pipeline_stage(inputs=X)
    with pytest.raises(ScheduleError, match=message):
        build(sch)


def test_batch_of_a_kind_that_uses_another_stage_is_refused() -> None:
    class Optional(Base):
        def forward(self, x: Tensor, early: Any = None) -> Tensor:
            if early is not None:
                x = self.d(x)
            return self.d(self.b(self.a(x)))

    scheduled = pipelines.cut(Optional(), "a", inputs=X)
    before = len(scheduled.pipeline.wirings)
    with pytest.raises(GuardError, match=r"(?s)early float32\[1\] uses 'd' on stage 0, which does not hold it"):
        scheduled.pipeline.wiring({**X, "early": torch.ones(1)}, training=True)
    assert len(scheduled.pipeline.wirings) == before


def test_unknown_entry_of_a_batch_is_refused() -> None:
    import models

    with pytest.raises(ValueError, match=r"the batch has 'input_idz', which Skip does not take"):
        refuse_unknown(Skip(), {"input_idz": 1})
    gpt2 = models.gpt2()
    refuse_unknown(gpt2, {"input_ids": 1, "attention_mask": 1, "labels": 1, "num_items_in_batch": 2})
    with pytest.raises(ValueError, match=r"'special_tokens_mask', which GPT2LMHeadModel does not take"):
        refuse_unknown(gpt2, {"special_tokens_mask": 1})
