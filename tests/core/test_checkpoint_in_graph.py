"""``checkpoint(at=match)``: a part of a forward is computed again in the backward pass, bit for bit the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import blocks
from blocks import ATTENTION, FEED, assert_trains_like, batch, net, scheduled, trained
from partbook.core import Match, create_schedule, module
from partbook.core.tracing.region import Region
from replays import assert_refused, assert_replays

CALLS: list[str] = []


def counted(q, k, v, mask, p, training):
    CALLS.append("core")
    return blocks.core(q, k, v, mask, p, training)


def with_counted_core(checkpoint=True):
    sch, attn = scheduled(p=0.5)
    attn.replace(counted, at=attn.match(blocks.core))
    if checkpoint:
        [at] = attn.find(node=lambda node: node.target is counted)
        attn.checkpoint(at=at)
    CALLS.clear()
    return sch, attn


def saved_bytes(run):
    """The bytes that autograd keeps of what ``run`` computes."""
    total = [0]

    def pack(x):
        total[0] += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return total[0]


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_match_is_computed_again_in_the_backward_pass():
    sch, _ = with_counted_core()
    torch.manual_seed(0)
    output = sch.module(**batch())
    assert len(CALLS) == 1
    output.sum().backward()
    assert len(CALLS) == 2
    plain, _ = with_counted_core(checkpoint=False)
    plain.module(**batch()).sum().backward()
    assert len(CALLS) == 1


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_nothing_is_computed_again_where_there_is_no_training(mode):
    sch, _ = with_counted_core()
    if mode == "eval":
        sch.module.eval()(**batch()).sum().backward()
    else:
        with getattr(torch, mode)():
            sch.module(**batch())
    assert len(CALLS) == 1


def test_activations_of_the_match_are_not_kept():
    given = batch(length=32)
    plain, attn = scheduled()
    kept = saved_bytes(lambda: plain.module(**given))
    sch, attn = scheduled()
    attn.checkpoint(at=attn.match(blocks.core))
    less = saved_bytes(lambda: sch.module(**given))
    # at least the probabilities: (2, 2, 32, 32) in float64
    assert kept - less > 2 * 2 * 32 * 32 * 8


def drop_add_norm(x, residual):
    return module("norm")(module("drop")(x) + residual)


@pytest.mark.parametrize(("path", "pattern"), [(ATTENTION, blocks.core), (FEED, drop_add_norm)])
def test_gradients_are_bitwise_those_of_the_traced_module(path, pattern):
    """Two steps: the random stream goes on from where it would be."""
    plain, _ = scheduled(path, p=0.5)
    sch, node = scheduled(path, p=0.5)
    node.checkpoint(at=node.match(pattern))
    assert sum(isinstance(each.target, Region) for each in node.graphs()[0].nodes) == 1
    for model in (plain.module, sch.module):
        torch.manual_seed(5)
        model.outputs = []
        for step in range(2):
            output = model(**batch(seed=step))
            output.square().sum().backward()
            model.outputs.append(output.detach())
    for one, other in zip(plain.module.outputs, sch.module.outputs, strict=True):
        assert torch.equal(one, other)
    wanted = gradients_of(plain.module)
    for name, grad in gradients_of(sch.module).items():
        assert torch.equal(grad, wanted[name]), name
    # dropout was on
    assert not torch.equal(trained(sch.module, batch(), seed=6), trained(sch.module, batch(), seed=7))


@pytest.mark.parametrize("training", [True, False])
def test_numbers_are_those_of_the_untouched_model(training):
    sch, attn = scheduled(p=0.5)
    attn.checkpoint(at=attn.match(blocks.core))
    dense = net(p=0.5)
    sch.module.train(training)
    dense.train(training)
    for length in (5, 9):
        assert_trains_like(sch, dense, batch(length))
    # a kind of call that has no such place runs as before
    assert_trains_like(sch, dense, batch(mask=False))
    assert_replays(sch, net(p=0.5))


def test_several_places_of_one_graph():
    sch, attn = scheduled(p=0.5)
    attn.checkpoint(at=attn.match(blocks.core))
    attn.checkpoint(at=attn.match(lambda x: module("o_proj")(x)))
    assert "recomputed" in str(attn.graphs()[0])
    assert_trains_like(sch, net(p=0.5), batch())


def test_part_of_a_recomputed_module():
    sch, attn = scheduled(p=0.5)
    attn.checkpoint(at=attn.match(blocks.core))
    sch["0"].checkpoint()
    assert_trains_like(sch, net(p=0.5), batch())


def test_place_is_found_again_after_a_child_has_changed():
    sch, attn = scheduled(p=0.5)
    attn.checkpoint(at=attn.match(blocks.core))
    attn["q_proj"].checkpoint()
    attn["k_proj"].decompose()
    assert "recomputed" in str(attn.graphs()[0])
    assert_trains_like(sch, net(p=0.5), batch())


def test_tree_names_the_place():
    sch, attn = scheduled()
    attn.checkpoint(at=attn.match(blocks.core))
    [line] = [line for line in str(sch).splitlines() if "Attention" in line]
    assert line.endswith("traced  core recomputed")


class InPlace(nn.Module):
    def forward(self, x):
        hidden = x * 2
        other = functional.relu(hidden)
        return other + hidden.mul_(3)


def scaled(hidden):
    return hidden.mul_(3)


def gelu(x):
    return functional.gelu(x)


GELU = Match(FEED, ("gelu",), gelu)


def used_up(sch):
    sch[FEED].checkpoint(at=GELU)


REFUSALS = [
    (None, lambda s: s[FEED].checkpoint(at=gelu), "the match is a function", "find(pattern) or match(pattern)"),
    (None, lambda s: s[ATTENTION].checkpoint(at=GELU), f"the match was found in '{FEED}'", f"sch['{FEED}']"),
    (None, lambda s: s["0"].checkpoint(at=Match("0", ("feed",))), "this module has no graph"),
    (used_up, lambda s: s[FEED].checkpoint(at=GELU), "the match gelu(gelu) is not in the graph any more", "find again"),
    (
        None,
        lambda s: s[FEED].checkpoint(at=Match(FEED, ("gelu", "drop"))),
        "lies between the nodes and can run neither before nor after all of them",
    ),
]


@pytest.mark.parametrize(("setup", "call", "message"), [(setup, call, text) for setup, call, *text in REFUSALS])
def test_refused_checkpoint_changes_nothing(setup, call, message):
    sch = create_schedule(net())
    for path in (ATTENTION, FEED):
        sch[path].trace(inputs=batch())
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def test_place_that_writes_to_a_value_from_outside_is_refused():
    """Recomputing would write a second time."""
    sch = create_schedule(InPlace())
    sch.trace(inputs={"x": torch.zeros(2, 3)})
    at = sch.match(scaled)
    assert_refused(
        sch, lambda s: s.checkpoint(at=at), "writes in place to 'mul'", "recomputing would write it twice", "take 'mul'"
    )
