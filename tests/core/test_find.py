"""``find``, ``match`` and ``graphs``: modules by path or type, places in a graph by pattern or predicate."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import blocks
import models
from blocks import ATTENTION, FEED
from partbook.core import Match, PatternError, ScheduleError, create_schedule, module
from replays import assert_refused, assert_replays, assert_unchanged


def paths(found):
    return [node.path for node in found]


def verbs(sch):
    return [(step.path, step.primitive.verb) for step in sch.history]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("*.attn", ["0.attn", "1.attn"]),
        ("**.up", ["0.feed.up", "1.feed.up"]),
        ("0.**.*_proj", [f"0.attn.{name}_proj" for name in "qkvo"]),
        ("*.attention", []),
        (blocks.Feed, ["0.feed", "1.feed"]),
        (nn.Dropout, ["0.feed.drop", "1.feed.drop"]),
        (nn.Conv1d, []),
    ],
)
def test_modules_are_found_by_path_and_by_type(what, found):
    sch = create_schedule(blocks.net(layers=2))
    assert paths(sch.find(what)) == found
    # only places in a graph need one
    assert len(sch.history) == 0


def test_modules_below_a_node_are_found_under_their_full_paths():
    sch = create_schedule(blocks.net(layers=2))
    assert paths(sch["1"].find("attn.*_proj")) == [f"1.attn.{name}_proj" for name in "qkvo"]
    assert paths(sch["1.feed"].find(nn.Linear)) == ["1.feed.up", "1.feed.down"]
    assert sch["1.feed"].find("1.feed") == []


def test_type_is_found_after_a_primitive_gave_the_module_its_own_class():
    sch = create_schedule(blocks.net())
    sch[FEED].checkpoint()
    assert paths(sch.find(blocks.Feed)) == [FEED]


def gelu(x):
    return functional.gelu(x)


def linear(x):
    return module("*")(x)


def test_pattern_gives_its_places_in_the_order_of_the_graph():
    _, attn = blocks.scheduled()
    [first, *others] = attn.find(lambda x: module("*_proj")(x))
    assert first.path == ATTENTION
    assert [match.nodes for match in (first, *others)] == [("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",)]
    assert attn.match(blocks.qkv).nodes == ("q_proj", "k_proj", "v_proj")
    nodes = ("transpose_3", "matmul", "mul", "add", "softmax", "dropout", "matmul_1")
    assert attn.match(blocks.core) == Match(ATTENTION, nodes, blocks.core)
    assert str(attn.match(blocks.core)) == f"core({', '.join(nodes)})"
    assert attn.find(gelu) == []


def test_predicate_gives_one_match_for_each_operation_that_it_takes():
    _, feed = blocks.scheduled(FEED, mask=False)
    found = feed.find(node=lambda node: node.op == "call_module")
    assert [match.nodes for match in found] == [("up",), ("down",), ("drop",), ("norm",)]
    assert all(match.path == FEED and match.pattern is None for match in found)
    # inputs and outputs are no operations, whatever the predicate says
    every = [match.nodes[0] for match in feed.find(node=lambda node: True)]
    assert every == ["up", "gelu", "down", "drop", "add", "norm"]
    assert feed.find(node=lambda node: node.target == "nothing") == []


@pytest.mark.parametrize("find", ["find", "match"])
def test_module_is_traced_by_need_once_and_the_step_is_recorded(find):
    """Default inputs: a transformers model needs no example. What finds nothing leaves the module as it is."""
    sch = create_schedule(models.gpt2())
    mlp = sch["transformer.h.1.mlp"]
    assert mlp.find(gelu) == []
    assert len(mlp.graphs()) == 1
    with pytest.raises(ScheduleError, match="no match"):
        mlp.match(gelu)
    assert verbs(sch) == []
    getattr(mlp, find)(lambda x: module("c_fc")(x))
    assert verbs(sch) == [("transformer.h.1.mlp", "trace")]
    mlp.find(lambda x: module("act")(x))
    assert verbs(sch) == [("transformer.h.1.mlp", "trace")]
    assert_replays(sch, models.gpt2())


def test_what_cannot_be_traced_by_need_is_refused():
    sch = create_schedule(blocks.net())
    assert_refused(sch, lambda s: s[FEED].find(gelu), "no example inputs are known for a Net", "trace(inputs=")


def with_mask(q, k, v, mask):
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, scale=8**-0.5, is_causal=False
    )


def causal(q, k, v):
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None, dropout_p=0.0, scale=8**-0.5, is_causal=True
    )


def test_default_inputs_give_kinds_of_calls_with_a_mask_and_without():
    attn = create_schedule(models.gpt2())["transformer.h.0.attn"]
    has_mask = ["attention_mask" in {node.name for node in graph.nodes} for graph in attn.graphs()]
    assert set(has_mask) == {True, False}
    # the first graph has one, and a pattern that only the others have is found as well
    assert has_mask[0]
    assert len(attn.match(with_mask).nodes) == len(attn.match(causal).nodes) == 1
    assert attn.match(causal).pattern is causal


def test_no_match_says_how_far_the_nearest_miss_came():
    def scaled(q, k):
        return functional.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, dim=-1)

    sch, _ = blocks.scheduled(mask=False)
    error = assert_refused(sch, lambda s: s[ATTENTION].match(scaled), f"sch['{ATTENTION}'].match(scaled)", "no match")
    assert "the nearest miss has" in str(error)
    assert "0.25" in str(error)
    assert "0.5" in str(error)


def test_no_match_of_an_absent_operation_lists_what_there_is():
    sch, _ = blocks.scheduled(FEED)
    assert_refused(sch, lambda s: s[FEED].match(lambda x: functional.silu(x)), "no match", "silu", "gelu")


def test_several_matches_are_named():
    sch, _ = blocks.scheduled(FEED)
    error = assert_refused(sch, lambda s: s[FEED].match(linear), "4 matches: linear(up), linear(down)")
    assert "find() gives all of them" in str(error)


def branches(x):
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (lambda s: s[FEED].find(branches), (f"sch['{FEED}'].find(branches)", "pattern branches: cannot be traced")),
        (lambda s: s[FEED].match(branches), ("pattern branches: cannot be traced",)),
        (lambda s: s[FEED].find(lambda x: x), ("returns its argument 'x'",)),
        (lambda s: s[FEED].find(nn.GELU()), ("is a GELU: write it as a function",)),
    ],
)
def test_what_is_no_pattern_is_refused_as_a_schedule_error(call, fragments):
    sch, _ = blocks.scheduled(FEED)
    error = assert_refused(sch, call, *fragments)
    assert isinstance(error.__cause__, PatternError)


def test_search_changes_nothing():
    sch, attn = blocks.scheduled()
    assert_unchanged(sch, lambda: (attn.find(blocks.core), attn.match(blocks.qkv), attn.find(node=lambda node: True)))


class Twice(nn.Module):
    def forward(self, x):
        hidden = functional.gelu(x)
        return hidden * 2 + hidden


def test_place_of_which_an_inner_value_is_used_elsewhere_is_no_match():
    """What it would be replaced by could not give that value."""
    sch = create_schedule(Twice())
    sch.trace(inputs={"x": torch.zeros(2, 3)})
    assert sch.find(lambda x: functional.gelu(x) * 2) == []
    # as a result of its own it can be
    assert len(sch.find(lambda x: (hidden := functional.gelu(x), hidden * 2))) == 1


def test_changed_module_is_searched_as_it_is_now():
    _, feed = blocks.scheduled(FEED)
    assert feed.find(blocks.bias_gelu) == []
    feed["up"].decompose()
    assert len(feed.find(blocks.bias_gelu)) == 1
    feed["drop"].replace(nn.Identity())
    assert feed.match(blocks.drop_add_norm).nodes == ("drop", "add_1", "norm")
