"""The history: printed, saved and replayed; a primitive of the user's own is in it like a built-in one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import nn

import models
from partbook.core import History, Mesh, Primitive, Problem, Site, apply_schedule, create_schedule
from replays import assert_refused, assert_replays, assert_unchanged


@dataclass(frozen=True)
class ScaleDropout(Primitive):
    """Multiply the rate of every dropout below a module."""

    verb: ClassVar[str] = "scale_dropout"
    factor: float
    skip: tuple[str, ...] = ()

    def check(self, site: Site) -> Iterator[Problem]:
        found = list(self._below(site))
        if not found:
            yield Problem(f"{type(site.module).__name__} holds no dropout", "point it at a module that does")
        for path, module in found:
            if not 0 <= module.p * self.factor < 1:
                yield Problem(f"{path}: {module.p} times {self.factor} is no rate")

    def apply(self, site: Site) -> None:
        for _, module in self._below(site):
            module.p *= self.factor

    def _below(self, site: Site) -> Iterator[tuple[str, nn.Dropout]]:
        for path, module in site.module.named_modules():
            if isinstance(module, nn.Dropout) and path not in self.skip:
                yield path, module


def test_own_primitive_is_applied_printed_saved_and_replayed():
    sch = create_schedule(models.Toy(), Mesh(tp=2, rank=1))
    assert sch.do(ScaleDropout(0.5)) is sch
    sch["drop"].do(ScaleDropout(3.0, skip=("other",)))
    assert sch.module.drop.p == 0.75
    assert str(sch.history) == "sch.scale_dropout(factor=0.5)\nsch['drop'].scale_dropout(factor=3.0, skip=('other',))"
    assert_replays(sch, models.Toy())


def test_own_primitive_is_refused_like_a_built_in_one():
    sch = create_schedule(models.Toy())
    assert_refused(
        sch, lambda s: s["up"].do(ScaleDropout(0.5)), "sch['up'].scale_dropout(factor=0.5)", "Linear holds no dropout"
    )
    assert_refused(
        sch, lambda s: s.do(ScaleDropout(2.0)), "sch.scale_dropout(factor=2.0)", "drop: 0.5 times 2.0 is no rate"
    )


def test_verb_belongs_to_one_primitive():
    with pytest.raises(
        ValueError, match=r"the verb 'shard' of .*Shard belongs to partbook\.core\.primitives\.shard\.Shard"
    ):
        type("Shard", (Primitive,), {"verb": "shard"})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "fuse_qkv": True, "checkpoint_ratio": 0.5}])
@pytest.mark.parametrize("rank", [0, 1])
def test_whole_schedules_replay_to_the_same_model(name, options, rank):
    make = getattr(models, name)
    sch = create_schedule(make(), Mesh(tp=2, rank=rank))
    apply_schedule(sch, name, options)
    assert_replays(sch, make())


def test_history_prints_as_the_program_that_it_is():
    sch = create_schedule(models.Toy(), Mesh(tp=2))
    sch["words"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    sch["act"].replace(nn.ReLU())
    assert str(sch.history).splitlines() == [
        "sch['words'].shard(param='weight', axis=0)",
        "sch['words'].sync(mode='fwd_post', op='all_reduce')",
        "sch['act'].replace(new=ReLU)",
    ]
    assert sch.history[-1].path == "act"


def test_history_is_a_sequence_that_compares_by_its_steps():
    first, second = (create_schedule(models.Toy()) for _ in range(2))
    for sch in (first, second):
        sch["up"].checkpoint()
    assert first.history == second.history
    second["down"].checkpoint()
    assert first.history != second.history
    assert [step.path for step in second.history] == ["up", "down"]
    assert second.history != "a history"


def test_replay_needs_the_same_tensor_parallel_size():
    sch = create_schedule(models.Toy(), Mesh(tp=2))
    sch["up"].shard("weight", axis=0)
    history = History.from_json(sch.history.to_json())
    fresh = create_schedule(models.Toy())
    with pytest.raises(ValueError, match="made for tp=2 and cannot be replayed on tp=4"):
        assert_unchanged(fresh, lambda: history.replay(fresh.module, Mesh(tp=4)))
    again = history.replay(models.Toy(), Mesh(dp=3, tp=2, rank=5))
    assert tuple(again.module.up.weight.shape) == (6, 8)
    # without a mesh: the one that it was made for
    assert history.replay(models.Toy()).mesh == Mesh(tp=2)


def test_text_that_is_no_history_is_refused():
    text = create_schedule(models.Toy()).history.to_json()
    with pytest.raises(ValueError, match="not a history of format 1: it says 2"):
        History.from_json(text.replace('"partbook history": 1', '"partbook history": 2'))
    step = {"path": "up", "verb": "chekpoint", "arguments": {}}
    with pytest.raises(ValueError, match=r"no primitive 'chekpoint'; did you mean 'checkpoint'.*imported\?"):
        History.from_json(json.dumps(json.loads(text) | {"steps": [step]}))
