"""Schedules by name, file or function, their options, and applying one as a whole or not at all."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn

import models
from partbook.core import (
    Mesh,
    Schedule,
    apply_schedule,
    create_schedule,
    find_dialect,
    find_schedule,
    model_schedule,
    rehearse,
)
from partbook.core.registry import ModelSchedule
from replays import assert_refused, assert_replays, assert_unchanged


@dataclass(frozen=True, kw_only=True)
class Knobs:
    count: int = 1
    rate: float = 0.5
    on: bool = False
    name: str = "x"
    cuts: tuple[int, ...] = ()
    limit: int | None = None
    mode: Literal["fast", "exact"] = "fast"


def knobs(sch: Schedule, options: Knobs) -> None:
    sch["up"].annotate("weight", "options", repr(options))


def free(sch: Schedule, options) -> None:
    sch["up"].annotate("weight", "options", options)


def plain(sch: Schedule) -> None:
    sch["up"].checkpoint()


FILE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    times: int = 2

def schedule(sch):
    sch["up"].checkpoint()

def shout(sch, options: Options):
    sch["up"].annotate("weight", "times", options.times)

LIMIT = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_schedules_are_found_by_name_file_module_and_function(file):
    assert find_schedule("gpt2").models == ("GPT2LMHeadModel",)
    assert find_schedule(f"{file}:shout").name == "shout"
    assert find_schedule(str(file)).name == "schedule"
    assert find_schedule("partbook.schedules.llama:llama") is find_schedule("llama")
    assert find_schedule(plain) == ModelSchedule("plain", plain)
    assert find_schedule(find_schedule("gpt2")) is find_schedule("gpt2")


def test_schedule_of_a_file_is_applied_with_its_options(file):
    sch = create_schedule(models.Toy())
    apply_schedule(sch, f"{file}:shout", {"times": "5"})
    assert sch.state.annotations == {"up.weight": {"times": 5}}
    apply_schedule(sch, str(file))
    assert_replays(sch, models.Toy())


def test_decorator_registers_a_schedule_under_its_name():
    find_schedule("gpt2")
    registered = model_schedule("toy-of-this-test", models=("Toy",))(plain)
    assert find_schedule("toy-of-this-test") is registered
    with pytest.raises(ValueError, match=r"the schedule 'gpt2' of .* is taken by partbook\.schedules\.gpt2"):
        model_schedule("gpt2")(plain)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gpt3", ("no schedule 'gpt3'; did you mean 'gpt2'?", "file.py:function")),
        ("zzz", ("no schedule 'zzz'; there are", "'gpt2'", "'llama'")),
        ("{file}:shut", ("has no function 'shut'; did you mean 'shout'",)),
        ("{file}:LIMIT", ("has no function 'LIMIT'; there are", "'schedule'", "'shout'")),
        ("no_such_package.schedules:f", ("there is no module 'no_such_package.schedules'", "FILE.py:FUNCTION")),
        ("{file}x.py:f", ("there is no schedule file", "mine.pyx.py", "looked in")),
    ],
)
def test_unknown_schedule_is_refused_with_what_there_is(file, what, message):
    with pytest.raises(ValueError) as caught:
        find_schedule(what.format(file=file))
    for fragment in message:
        assert fragment in str(caught.value)


def test_unknown_dialect_is_refused_with_the_near_names():
    assert find_dialect("pytorch").__name__ == "partbook.dialects.pytorch"
    with pytest.raises(ValueError, match="no dialect 'deepsped'; did you mean 'deepspeed'"):
        find_dialect("deepsped")


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (None, Knobs()),
        (Knobs(count=3), Knobs(count=3)),
        ({"count": "3", "rate": "2", "on": "true", "name": "3"}, Knobs(count=3, rate=2.0, on=True, name="3")),
        ({"on": "False", "cuts": "(1, 2)", "limit": "7"}, Knobs(on=False, cuts=(1, 2), limit=7)),
        ({"limit": "none", "mode": "exact"}, Knobs(limit=None, mode="exact")),
        ({"limit": None, "rate": 1}, Knobs(rate=1.0)),
        ({"cuts": (4,), "rate": "1e-3"}, Knobs(cuts=(4,), rate=1e-3)),
    ],
)
def test_options_are_parsed_by_their_types(given, parsed):
    found = find_schedule(knobs).parse(given)
    assert found == parsed
    assert [type(value) for value in vars(found).values()] == [type(value) for value in vars(parsed).values()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cout": 1}, ("schedule 'knobs' has no option 'cout'; did you mean 'count'",)),
        ({"zzz": 1}, ("no option 'zzz'; there are 'count', 'rate', 'on'",)),
        ({"count": "many"}, ("option count='many' of schedule 'knobs' is no int",)),
        ({"count": "2.5"}, ("option count='2.5' of schedule 'knobs' is no int",)),
        ({"count": True}, ("option count=True of schedule 'knobs' is no int",)),
        ({"rate": "fast"}, ("option rate='fast'", "is no float")),
        ({"on": "yes"}, ("option on='yes'", "is no bool")),
        ({"on": 1}, ("option on=1", "is no bool")),
        ({"name": 3}, ("option name=3", "is no str")),
        ({"cuts": "3"}, ("option cuts='3'", "is no tuple")),
        ({"limit": "x"}, ("option limit='x'", "is no int | None")),
        ({"mode": "fats"}, ("option mode='fats'", "is none of 'fast', 'exact'")),
    ],
)
def test_option_that_does_not_exist_or_fit_is_refused(given, message):
    sch = create_schedule(models.Toy())
    with pytest.raises(ValueError) as caught:
        assert_unchanged(sch, lambda: apply_schedule(sch, knobs, given))
    for fragment in message:
        assert fragment in str(caught.value)


def test_schedules_without_declared_options_take_a_dict_or_nothing():
    assert find_schedule(free).parse({"a": "1", "b": "text", "c": "True", "d": [1]}) == {
        "a": 1,
        "b": "text",
        "c": True,
        "d": [1],
    }
    assert find_schedule(plain).parse() == {}
    with pytest.raises(ValueError, match=r"schedule 'plain' takes no options, but got \['a', 'b'\]"):
        find_schedule(plain).parse({"b": 1, "a": 1})


def test_option_without_a_default_is_asked_for():
    @dataclass(frozen=True)
    class Needed:
        size: int

    def needy(sch: Schedule, options: Needed) -> None: ...

    needy.__annotations__ = {"sch": Schedule, "options": Needed}
    with pytest.raises(ValueError, match="schedule 'needy' needs the option 'size'"):
        find_schedule(needy).parse()


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (models.llama, "gpt2", ("'gpt2' is for GPT2LMHeadModel, not for LlamaForCausalLM", "there is ['llama']")),
        (models.gpt2, "llama", ("not for GPT2LMHeadModel", "for GPT2LMHeadModel there is ['gpt2']")),
        (models.Toy, "gpt2", ("not for Toy", "write one of your own: file.py:function")),
    ],
)
def test_wrong_model_is_refused_with_the_right_schedule(make, name, message):
    sch = create_schedule(make())
    assert_refused(sch, lambda s: apply_schedule(s, name), f"apply_schedule(sch, {name!r})", *message)


def test_a_subclass_is_the_model_that_it_extends():
    class Mine(type(models.gpt2())):
        pass

    apply_schedule(create_schedule(Mine(models.gpt2().config), Mesh(tp=2)), "gpt2")


def breaks_a_rule(sch):
    sch["up"].shard("weight", axis=0).shard("bias", axis=0)
    sch["act"].replace(nn.ReLU())
    sch["drop"].checkpoint()
    sch["down"].shard("weight", axis=5)


def leaves_a_partial_sum(sch):
    sch["down"].checkpoint().shard("weight", axis=1)


def crashes(sch):
    sch["up"].checkpoint()
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (breaks_a_rule, ValueError, "axis 5 is out of range"),
        (leaves_a_partial_sum, ValueError, "a partial sum that nothing reduces"),
        (crashes, ZeroDivisionError, "by zero"),
        ("gpt2", ValueError, "is for GPT2LMHeadModel"),
    ],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_schedule_that_fails_in_the_middle_leaves_the_model_as_it_was(schedule, error, message, earlier):
    sch = create_schedule(models.Toy(), Mesh(tp=2, rank=1))
    if earlier:
        sch["words"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    with pytest.raises(error, match=message):
        assert_unchanged(sch, lambda: apply_schedule(sch, schedule))
    # and it can still be scheduled
    apply_schedule(sch, plain)


@pytest.mark.parametrize("name", ["transformer.h.1.mlp.c_proj", "transformer.ln_f"])
def test_a_gradient_anywhere_stops_the_schedule_before_its_first_step_or_not_at_all(name):
    """Only sharded parameters must be free of gradients, and a gradient of the last must not be found half-way."""
    sch = create_schedule(models.gpt2(), Mesh(tp=2))
    weight = sch[name].module.weight
    weight.grad = torch.zeros_like(weight)
    if name.endswith("ln_f"):
        apply_schedule(sch, "gpt2")
    else:
        with pytest.raises(ValueError, match="weight holds a gradient of its full shape"):
            assert_unchanged(sch, lambda: apply_schedule(sch, "gpt2"))


def test_rehearsal_shows_what_a_schedule_would_do_and_touches_nothing():
    sch = create_schedule(models.gpt2(), Mesh(tp=2, rank=1))
    sch["transformer.drop"].replace(nn.Identity())
    trial = None

    def call():
        nonlocal trial
        trial = rehearse(sch, "gpt2", {"fuse_qkv": True})
        raise KeyError

    with pytest.raises(KeyError):
        assert_unchanged(sch, call)
    assert all(parameter.is_meta for parameter in trial.module.parameters())
    apply_schedule(sch, "gpt2", {"fuse_qkv": True})
    assert str(trial) == str(sch)
    assert trial.history == sch.history


def test_schedule_of_a_part_is_applied_to_that_part():
    model = nn.ModuleDict({"toy": models.Toy(), "other": models.Toy()})
    sch = create_schedule(model)
    apply_schedule(sch["toy"], plain)
    assert [step.path for step in sch.history] == ["toy.up"]


def test_schedules_are_not_for_virtual_meshes_alone():
    """The default mesh is one process, where the same program runs."""
    sch = create_schedule(models.gpt2())
    apply_schedule(sch, "gpt2", {"sequence_parallel": "true", "checkpoint_ratio": 1})
    assert sch.module(**models.batch()).loss.isfinite()
