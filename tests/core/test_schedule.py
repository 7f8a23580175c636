"""The schedule as a tree of handles: paths, globs, printing, and what it says of a path that is not there."""

import pytest
import torch
from torch import nn

import models
from partbook.core import Mesh, Schedule, ScheduleError, create_schedule
from replays import assert_refused, assert_replays


def paths(nodes):
    return [node.path for node in nodes]


@pytest.fixture
def sch():
    return create_schedule(models.gpt2(), Mesh(tp=2, rank=1))


def test_nodes_are_named_by_absolute_and_relative_paths(sch):
    node = sch["transformer.h.0.mlp"]
    assert node.path == "transformer.h.0.mlp"
    assert node.module is sch.module.transformer.h[0].mlp
    assert sch["transformer"]["h.0"]["mlp"].module is node.module
    assert sch["transformer"]["h"]["1"].path == "transformer.h.1"
    assert sch[""].module is sch.module
    assert repr(node) == "<Schedule transformer.h.0.mlp: GPT2MLP>"
    assert repr(sch) == "<Schedule (root): GPT2LMHeadModel>"


def test_in_asks_for_a_module_below(sch):
    assert "lm_head" in sch
    assert "transformer.h.1.attn" in sch
    assert "h.1.attn" in sch["transformer"]
    assert "transformer.h.2" not in sch
    assert "lm_head" not in sch["transformer"]
    # a parameter or an attribute is no node
    assert "lm_head.weight" not in sch
    assert "config" not in sch


def test_iterating_gives_the_children_in_model_order(sch):
    assert paths(sch) == ["transformer", "lm_head"]
    assert paths(sch["transformer.h.0"]) == [f"transformer.h.0.{name}" for name in ("ln_1", "attn", "ln_2", "mlp")]
    assert list(sch["lm_head"]) == []


@pytest.mark.parametrize(
    ("start", "glob", "found"),
    [
        ("", "transformer.h.*", ["transformer.h.0", "transformer.h.1"]),
        ("transformer", "h.*.mlp", ["transformer.h.0.mlp", "transformer.h.1.mlp"]),
        ("", "*", ["transformer", "lm_head"]),
        ("", "**.c_proj", [f"transformer.h.{i}.{part}.c_proj" for i in (0, 1) for part in ("attn", "mlp")]),
        ("", "transformer.**.ln_[12]", [f"transformer.h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)]),
        ("transformer.h.1", "**.c_fc", ["transformer.h.1.mlp.c_fc"]),
        ("", "**.h.**.c_fc", [f"transformer.h.{i}.mlp.c_fc" for i in (0, 1)]),
        ("", "lm_head.**", ["lm_head"]),
    ],
)
def test_globs_find_nodes_in_model_order(sch, start, glob, found):
    assert paths(sch[start].select(glob)) == found


def test_a_star_is_one_name_and_double_star_any_number(sch):
    assert len(sch.select("**")) == len(list(sch.module.named_modules())) - 1
    assert paths(sch.select("*.*")) == [f"transformer.{name}" for name in ("wte", "wpe", "drop", "h", "ln_f")]


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (
            lambda s: s["transformer.h.0.atn"],
            ("sch['transformer.h.0.atn']", "no module 'transformer.h.0.atn'", "'attn'"),
        ),
        (lambda s: s["lm_hed"], ("there is no module 'lm_hed'", "did you mean 'lm_head'?")),
        (
            lambda s: s["transformer"]["h.7"],
            ("no module 'transformer.h.7'", "below 'transformer.h' there are '0', '1'"),
        ),
        (
            lambda s: s["transformer.x.y"],
            ("no module 'transformer.x.y'", "below 'transformer' there are 'wte', 'wpe', 'drop'"),
        ),
        (lambda s: s["lm_head.weight"], ("no module 'lm_head.weight'", "there are none")),
        (
            lambda s: s.select("transformer.g.*"),
            ("sch.select('transformer.g.*')", "no module below 'the model' matches"),
        ),
        (lambda s: s["lm_head"].select("*"), ("sch['lm_head'].select('*')", "no module below 'lm_head' matches '*'")),
    ],
)
def test_unknown_path_is_refused_with_its_neighbours_and_the_line(sch, call, fragments):
    assert_refused(sch, call, *fragments)


def test_model_that_is_scheduled_already_is_refused():
    for step in (
        lambda s: s["up"].checkpoint(),
        lambda s: s["up"].shard("weight", axis=0),
        lambda s: s["up"].annotate("weight", "lr", 2),
        lambda s: s["up"].replace(nn.Linear(8, 12)),
    ):
        sch = create_schedule(models.Toy(), Mesh(tp=2))
        step(sch)
        assert_refused(sch, lambda s: create_schedule(s.module), "this Toy has been scheduled before", "a fresh model")


def test_a_schedule_without_steps_changes_nothing_and_may_be_made_again(sch):
    create_schedule(sch.module)
    assert len(sch.history) == 0
    assert str(sch.history) == ""
    assert_replays(sch, models.gpt2())


def test_verbs_chain_and_are_known_to_editors():
    sch = create_schedule(models.Toy(), Mesh(tp=2))
    node = sch["up"]
    assert node.shard("weight", axis=0).shard("bias", axis=0) is node
    assert Schedule.shard.__name__ == "shard"
    assert "column parallel" in Schedule.shard.__doc__
    with pytest.raises(TypeError, match="axs"):
        node.shard("weight", axs=0)
    assert [str(step) for step in sch.history] == [
        "sch['up'].shard(param='weight', axis=0)",
        "sch['up'].shard(param='bias', axis=0)",
    ]
    assert all(step.where.startswith(f"{__file__}:") for step in sch.history)


def test_several_broken_rules_come_in_one_error():
    sch = create_schedule(models.Toy(), Mesh(tp=5))
    error = assert_refused(
        sch, lambda s: s["up"].shard("weight", axis=0, segments=(4, 9)), "add up to 13", "size 4 of", "size 9 of"
    )
    assert len(error.problems) == 3
    assert isinstance(error, ScheduleError)
    assert isinstance(error, ValueError)


TREE = """\
(model): Toy   [dp=1 pp=1 tp=2, rank 1, virtual]
  words: Embedding  weight [6, 8] (dim 0 of [11, 8] over 2, 1 padded)  sync(mode='fwd_post', op='all_reduce')
  norm: LayerNorm  weight [8]  bias [8]  gradient of weight summed over 2
  up: Linear  weight [6, 8] (dim 0 of [12, 8] over 2, segments [8, 4])  bias [12]
  act: GELU
  drop: Dropout  forked rng
  down: Linear  weight [8, 12]  bias [8]  checkpoint
  head: Linear  weight [6, 8] (dim 0 of [11, 8] over 2, 1 padded)"""


def test_printed_tree_shows_shapes_shards_syncs_recomputation_and_random_streams():
    sch = create_schedule(models.Toy(vocab=11), Mesh(tp=2, rank=1))
    sch["words"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch["norm"].annotate("weight", "partial_gradient", True)
    sch["up"].shard("weight", axis=0, segments=(8, 4))
    sch["drop"].fork_rng()
    sch["down"].checkpoint()
    assert str(sch) == TREE
    assert str(sch["up"]) == f"up: {TREE.splitlines()[3].strip().removeprefix('up: ')}"
    assert_replays(sch, models.Toy(vocab=11))


BLOCKS = """\
(model): Sequential   [dp=3 pp=1 tp=1, rank 2]
  0 to 1: Linear  weight [4, 4]
  2: Linear  weight [4, 4]  checkpoint
  3: Linear  weight [4, 4]
  4: ReLU"""


def test_equal_neighbours_are_printed_once():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)), nn.ReLU())
    sch = create_schedule(model, Mesh(dp=3, rank=2))
    sch["2"].checkpoint()
    assert str(sch) == BLOCKS


def test_the_model_runs_between_any_two_primitives():
    model, ids = models.Toy().eval(), torch.tensor([[0, 5, 9]])
    reference = model(ids)
    sch = create_schedule(model)
    for step in (
        lambda: sch["up"].shard("weight", axis=0).shard("bias", axis=0),
        lambda: sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce"),
        lambda: sch["words"].shard("weight", axis=0).sync("fwd_post", "all_reduce"),
        lambda: sch["up"].checkpoint(),
    ):
        step()
        assert torch.equal(model(ids), reference)
