"""``annotate`` and ``set_attribute``: facts about a parameter, and a module's own numbers."""

import pytest
import torch

import models
from partbook.core import Mesh, create_schedule
from partbook.core.execution import plan_of
from replays import assert_refused, assert_replays


def toy(tp=2):
    return create_schedule(models.Toy(), Mesh(tp=tp))


@pytest.mark.parametrize("value", [2.5, "no_decay", True, None, (1, 2), [1, [2, 3]], {"lr": 0.1, "groups": ["a", "b"]}])
def test_any_plain_value_is_kept_and_replayed(value):
    sch = toy()
    sch["up"].annotate("weight", "mine", value)
    assert sch.state.annotations == {"up.weight": {"mine": value}}
    assert_replays(sch, models.Toy())


def test_tied_parameter_is_annotated_under_its_first_name():
    sch = toy()
    sch["head"].annotate("weight", "mine", 1)
    sch["words"].annotate("weight", "yours", 2)
    assert sch.state.annotations == {"words.weight": {"mine": 1, "yours": 2}}


@pytest.mark.parametrize("tp", [1, 2])
def test_partial_gradient_is_summed_by_every_owner(tp):
    sch = toy(tp)
    sch["head"].annotate("weight", "partial_gradient", True)
    for path in ("words", "head"):
        plan = plan_of(sch[path].module)
        assert plan.partial_gradients == {"weight": 2} if tp > 1 else plan is None
    assert_replays(sch, models.Toy())


def partial(sch):
    sch["norm"].annotate("weight", "partial_gradient", True)


def split(sch):
    sch["up"].shard("weight", axis=0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("setup", "call", "message"),
    [
        (None, lambda s: s["up"].annotate("wait", "a", 1), ("Linear has no parameter 'wait'", "'weight'")),
        (
            None,
            lambda s: s["norm"].annotate("weight", "partial_gradient", False),
            ("partial_gradient can only be True",),
        ),
        (
            partial,
            lambda s: s["norm"].annotate("weight", "partial_gradient", True),
            ("norm.weight has a partial gradient",),
        ),
        (
            split,
            lambda s: s["up"].annotate("weight", "partial_gradient", True),
            ("up.weight is sharded: each rank has",),
        ),
    ],
)
def test_annotation_that_cannot_hold_is_refused(tp, setup, call, message):
    sch = toy(tp)
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def test_attribute_gets_its_value_per_rank():
    sch = create_schedule(models.gpt2(), Mesh(tp=2))
    attn = sch["transformer.h.0.attn"].set_attribute("split_size", 16)
    assert attn.module.split_size == 16
    assert sch.module.transformer.h[1].attn.split_size == 32
    assert_replays(sch, models.gpt2())


@pytest.mark.parametrize("value", [(1, 2), [1, 2], {"a": (1, [2])}, {1: "one"}])
def test_attribute_keeps_its_type_through_a_saved_history(value):
    def make():
        model = models.Toy()
        model.sizes = type(value)()
        return model

    sch = create_schedule(make())
    sch.set_attribute("sizes", value)
    fresh = make()
    assert_replays(sch, fresh)
    assert repr(fresh.sizes) == repr(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.set_attribute("split_sise", 1), ("GPT2Attention has no attribute 'split_sise'", "'split_size'")),
        (lambda s: s.set_attribute("split_size", 1.5), ("'split_size' is a int, not a float",)),
        (lambda s: s.set_attribute("scale_attn_weights", 1), ("'scale_attn_weights' is a bool, not a int",)),
        (lambda s: s.set_attribute("c_proj", 1), ("'c_proj' is a Conv1D", "use replace or shard")),
        (lambda s: s["c_proj"].set_attribute("weight", 1), ("'weight' is a Parameter", "use replace or shard")),
    ],
)
def test_attribute_that_is_not_there_or_of_another_type_is_refused(call, message):
    assert_refused(create_schedule(models.gpt2(), Mesh(tp=2))["transformer.h.0.attn"], call, *message)


def test_values_that_are_no_text_are_refused_on_saving_only():
    sch = toy()
    sch["up"].annotate("weight", "mine", torch.zeros(1))
    with pytest.raises(ValueError) as caught:
        sch.history.to_json()
    assert "value is a Tensor, which cannot be saved as text" in str(caught.value)
    assert "annotate(param='weight', key='mine'" in str(caught.value)


def test_property_without_a_setter_is_refused():
    sch = create_schedule(models.gpt2(), Mesh(tp=2))
    assert_refused(sch, lambda s: s.set_attribute("device", torch.device("cpu")), "'device' is a property")
