"""Cuts that are refused, with the module and the line, and nothing changed; batches that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import pipelines
from partbook.core import GuardError, Mesh, ScheduleError, build, create_schedule
from partbook.core.pipeline import refuse_unknown
from pipelines import Linears as Base
from pipelines import Nested, Skip, X


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
        assert "test_pipeline_refusals.py" in str(refused.value)
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
    with pytest.raises(ValueError, match=r"the batch has 'input_idz', which Skip does not take"):
        refuse_unknown(Skip(), {"input_idz": 1})
    gpt2 = models.gpt2()
    refuse_unknown(gpt2, {"input_ids": 1, "attention_mask": 1, "labels": 1, "num_items_in_batch": 2})
    with pytest.raises(ValueError, match=r"'special_tokens_mask', which GPT2LMHeadModel does not take"):
        refuse_unknown(gpt2, {"special_tokens_mask": 1})
