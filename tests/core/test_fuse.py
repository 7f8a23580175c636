"""``fuse``: a match becomes one call, compiled or not, and computes what the operations did. Regions: test_fused.py."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import blocks
import models
from blocks import ATTENTION, FEED, assert_trains_like, batch, net, scheduled, trained
from partbook.core import GuardError, Match, Mesh, ScheduleError, create_schedule, module
from partbook.core.tracing.region import Region
from replays import assert_refused, assert_replays

COMPILERS = [None, "torchscript", "inductor"]


def fused(compiler, p=0.5, mesh=None, dtype=torch.float64):
    """bias and GELU as one, dropout, residual and norm as another."""
    sch, feed = scheduled(FEED, mask=False, p=p, mesh=mesh, dtype=dtype)
    feed["up"].decompose()
    feed.fuse(feed.match(blocks.bias_gelu), compiler=compiler)
    feed.fuse(feed.match(blocks.drop_add_norm), compiler=compiler)
    return sch, feed


def regions(node):
    return [each.target for graph in node.graphs() for each in graph.nodes if isinstance(each.target, Region)]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_and_evaluation_are_those_of_the_untouched_model(compiler, dtype):
    """Dropout draws the masks that it draws without the region; another length needs nothing new."""
    sch, feed = fused(compiler, dtype=dtype)
    assert {region.label for region in regions(feed)} == {"fused_add_gelu", "fused_drop_add_norm"}
    assert {region.kind for region in regions(feed)} == {compiler or "grouped"}
    dense, known = net(p=0.5, dtype=dtype), len(feed.graphs())
    for training in (True, False, True):
        sch.module.train(training)
        dense.train(training)
        for length in (5, 9):
            given = batch(length, mask=False, dtype=dtype)
            assert_trains_like(sch, dense, given, 1e-12 if dtype is torch.float64 else 1e-5)
    assert len(feed.graphs()) == known
    assert_replays(sch, net(p=0.5, dtype=dtype))


def test_mask_of_another_seed_is_another_one():
    """Else equal masks above would show nothing."""
    sch, _ = fused("inductor")
    given = batch(mask=False)
    assert torch.equal(trained(sch.module, given), trained(sch.module, given))
    assert not torch.allclose(trained(sch.module, given), trained(sch.module, given, seed=4))


def test_tree_names_the_regions():
    sch, _ = fused(None)
    [line] = [line for line in str(sch).splitlines() if "Feed" in line]
    assert line.endswith("traced  bias_gelu fused  drop_add_norm fused")


@pytest.mark.parametrize("compiler", COMPILERS)
def test_copy_of_a_model_runs_on_weights_of_its_own(compiler):
    sch, _ = fused(compiler, p=0.0)
    other = copy.deepcopy(sch.module)
    expected = net()(**batch(mask=False))
    with torch.no_grad():
        sch.module[0].feed.norm.weight.zero_()
    torch.testing.assert_close(other(**batch(mask=False)), expected, rtol=0, atol=1e-12)


def test_nodes_of_which_several_values_are_used_give_all_of_them():
    """Single nodes have no results of their own: what others use is one."""
    sch, attn = scheduled()
    attn.fuse(Match(ATTENTION, ("q_proj", "k_proj", "view", "transpose")), compiler=None)
    [region, _] = regions(attn)
    assert len(region.graph.output_node().args[0]) == 2
    assert_trains_like(sch, net(), batch())


def test_regions_grow_into_larger_ones():
    sch, feed = fused(None)
    [first] = feed.find(node=lambda node: getattr(node.target, "label", "") == "fused_add_gelu")
    feed.fuse(Match(FEED, (*first.nodes, "down")), compiler=None)
    assert len(regions(feed)) == 2
    assert_trains_like(sch, net(p=0.5), batch(mask=False))


# ------------------------------------------------------------------------- what is done to a child that was inlined


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_hook_that_is_put_on_an_inlined_child_later_is_called(compiler):
    sch, feed = fused(compiler, p=0.0)
    dense, given, seen = net(), batch(mask=False), []
    assert_trains_like(sch, dense, given)
    handle = feed.module.drop.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    assert_trains_like(sch, dense, given)
    # the call is of a new kind, which was traced: that runs hooks too
    assert torch.Tensor in seen
    seen.clear()
    assert_trains_like(sch, dense, given)
    assert seen == [torch.Tensor]
    handle.remove()
    assert_trains_like(sch, dense, given)
    assert seen == [torch.Tensor]


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_backward_hook_that_is_put_on_an_inlined_child_later_is_called(compiler):
    sch, feed = fused(compiler, p=0.0)
    seen = []
    feed.module.drop.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    if compiler:
        with pytest.raises(GuardError, match="has backward hooks, which a compiled region does not call"):
            trained(sch.module, batch(mask=False))
    else:
        trained(sch.module, batch(mask=False))
        assert seen == [torch.Size([2, 5, 8])]


def test_hook_that_torchscript_cannot_call_fails_loudly():
    sch, feed = fused("torchscript", p=0.0)
    feed.module.drop.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(GuardError, match=r"TorchScript cannot call the module 'drop' \(Dropout\): it has hooks"):
        sch.module(**batch(mask=False))


def doubling(old):
    return Doubling()


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("compiler", COMPILERS)
def test_replacement_of_an_inlined_child_takes_effect(compiler):
    sch, feed = fused(compiler, p=0.0)
    dense = net()
    assert_trains_like(sch, dense, batch(mask=False))
    feed["drop"].replace(doubling)
    dense[0].feed.drop = Doubling()
    assert_trains_like(sch, dense, batch(mask=False))
    assert_replays(sch, net())


def test_random_stream_of_an_inlined_child_is_refused():
    _, feed = fused("inductor", mesh=Mesh(tp=2))
    inlined = [region.inlined for region in regions(feed) if "norm" in region.label]
    assert inlined == [("drop", "norm")] * 2
    feed["drop"].fork_rng()
    with pytest.raises(ScheduleError, match="'drop' has a random stream of its own, which a compiled region cannot"):
        feed.graphs()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_changed_rate_of_an_inlined_dropout_is_not_ignored(compiler):
    sch, feed = fused(compiler)
    dense = net(p=0.5)
    assert_trains_like(sch, dense, batch(mask=False))
    feed.module.drop.p = dense[0].feed.drop.p = 0.0
    assert_trains_like(sch, dense, batch(mask=False))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_frozen_child_mode_is_followed(compiler):
    """A child that alone is in evaluation mode does not drop."""
    sch, _ = fused(compiler)
    dense = net(p=0.5)
    for model in (sch.module, dense):
        model[0].feed.drop.eval()
    assert_trains_like(sch, dense, batch(mask=False))


# --------------------------------------------------------------------------------------------------------- refusals


def gelu(x):
    return functional.gelu(x)


def softmax(x):
    return functional.softmax(x, dim=-1)


def drop(x):
    return module("drop")(x)


def hooked(sch):
    sch[FEED].module.drop.register_forward_hook(lambda *_: None)


def used_up(sch):
    sch[FEED].fuse(GELU, compiler=None)


def recomputed(sch):
    sch[FEED].checkpoint(at=GELU)


GELU, DROP = Match(FEED, ("gelu",), gelu), Match(FEED, ("drop",), drop)

REFUSALS = {
    "compiler": (
        None,
        lambda s: s[FEED].fuse(GELU, compiler="torch_script"),
        "no compiler 'torch_script'",
        "did you mean 'torchscript'?",
    ),
    "no match": (None, lambda s: s[FEED].fuse(gelu), "the match is a function", "find(pattern) or match(pattern)"),
    "another module's": (None, lambda s: s[ATTENTION].fuse(GELU), f"the match was found in '{FEED}'", f"sch['{FEED}']"),
    "no graph": (None, lambda s: s["0"].fuse(Match("0", ("feed",))), "this module has no graph", "trace() or find"),
    "stale": (used_up, lambda s: s[FEED].fuse(GELU), "the match gelu(gelu) is not in the graph any more", "find again"),
    "no such node": (None, lambda s: s[FEED].fuse(Match(FEED, ("relu",))), "match node(relu) is not in the graph"),
    # find() gives no match of which an inner value is used elsewhere
    "leaking": (
        None,
        lambda s: s[ATTENTION].fuse(Match(ATTENTION, ("transpose_3", "matmul"), softmax)),
        "the match softmax(transpose_3, matmul) is not in the graph any more",
    ),
    "a gap": (
        None,
        lambda s: s[FEED].fuse(Match(FEED, ("gelu", "drop"))),
        "'down'",
        "lies between the nodes and can run neither before nor after all of them",
        "'down' uses 'gelu'",
        "take 'down' in",
    ),
    "an input": (
        None,
        lambda s: s[FEED].fuse(Match(FEED, ("x", "up"))),
        "'x' is an input of the graph, not an operation",
        "leave it out",
    ),
    "hooks in torchscript": (
        hooked,
        lambda s: s[FEED].fuse(DROP, compiler="torchscript"),
        "TorchScript cannot call the module 'drop' (Dropout): it has hooks",
        'fuse with compiler="inductor"',
    ),
    "recomputed": (
        recomputed,
        lambda s: s[FEED].fuse(Match(FEED, ("recomputed_gelu", "down"))),
        "is recomputed in the backward pass, which a compiled region cannot contain",
        "fuse first, then checkpoint around it",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_fusion_changes_nothing(case):
    setup, call, *message = REFUSALS[case]
    sch = create_schedule(net())
    for path in (ATTENTION, FEED):
        sch[path].trace(inputs=batch())
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


# --------------------------------------------------------------------------------------------------- order of steps


def test_fused_and_then_recomputed():
    sch, feed = fused(None)
    [region] = feed.find(node=lambda node: getattr(node.target, "label", "") == "fused_drop_add_norm")
    feed.checkpoint(at=region)
    assert_trains_like(sch, net(p=0.5), batch(mask=False))


def test_two_models_of_one_text_do_not_mix_their_weights():
    """Equal regions share what is compiled."""
    first, _ = fused("torchscript", p=0.0)
    second, _ = fused("torchscript", p=0.0)
    with torch.no_grad():
        second.module[0].feed.norm.weight.mul_(3)
    dense = net()
    assert_trains_like(first, dense, batch(mask=False))
    with torch.no_grad():
        dense[0].feed.norm.weight.mul_(3)
    assert_trains_like(second, dense, batch(mask=False))


def test_module_on_the_meta_device_is_fused_before_it_has_weights():
    sch = create_schedule(models.on_meta(models.gpt2))
    mlp = sch["transformer.h.0.mlp"]
    mlp["c_fc"].decompose()
    mlp.fuse(mlp.match(lambda x, bias: module("act")(x + bias)), compiler=None)
    assert [region.label for region in regions(mlp)] == ["fused_add_act"]
