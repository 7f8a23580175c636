"""``replace`` at a match: what is refused, with nothing changed; ties, buffers, children that are called elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import blocks
from blocks import ATTENTION, FEED, QKV, assert_trains_like, batch, net
from partbook.core import GuardError, Match, Mesh, ScheduleError, build, cat, create_schedule, module, transpose
from replays import assert_refused, assert_replays

NAMES = ("q_proj", "k_proj", "v_proj")


def gelu(x):
    return functional.gelu(x)


def targets(graph):
    return [str(getattr(node.target, "__name__", node.target)) for node in graph.nodes if node.op.startswith("call_")]


def same_shapes(attention):
    return nn.Linear(8, 24, dtype=torch.float64, bias=False)


def another(x):
    return module("q_proj")(x)


def drop_and_add(x, residual):
    dropped = module("drop")(x)
    return dropped, dropped + residual


def up(x):
    return module("up")(x)


def taken(sch):
    replace_qkv()(sch)
    sch[ATTENTION].graphs()


def hooked(sch):
    sch[ATTENTION].module.k_proj.register_forward_hook(lambda *_: None)


def backward_hooked(sch):
    sch[ATTENTION].module.k_proj.register_full_backward_hook(lambda *_: None)


def double(x, group):
    return x * 2


def synced(sch):
    sch[f"{ATTENTION}.k_proj"].sync("fwd_post", double)
    sch[ATTENTION].graphs()


def forked(sch):
    sch[f"{FEED}.drop"].fork_rng()


def sharded(sch):
    for name in NAMES:
        sch[f"{ATTENTION}.{name}"].shard("weight", axis=0).shard("bias", axis=0)
    sch[f"{ATTENTION}.o_proj"].shard("weight", axis=1)
    sch[ATTENTION].graphs()


def without_graph(sch):
    assert "traced" not in str(sch["0"]).splitlines()[0]


QKV_MATCH = Match(ATTENTION, NAMES, blocks.qkv)
CORE_MATCH = Match(ATTENTION, ("transpose_3", "matmul", "mul", "add", "softmax", "dropout", "matmul_1"), blocks.core)
GELU_MATCH, UP_MATCH = Match(FEED, ("gelu",), gelu), Match(FEED, ("up",), up)
END_MATCH = Match(FEED, ("drop", "add", "norm"), blocks.drop_add_norm)


def replace_qkv(new=blocks.fused_qkv, name="qkv", mapping=QKV):
    return lambda s: s[ATTENTION].replace(new, at=QKV_MATCH, name=name, mapping=mapping)


REFUSALS = {
    # the match
    "no match": (None, lambda s: s[FEED].replace(gelu, at="gelu"), "the match is a str", "find(pattern)"),
    "another module's": (None, lambda s: s[FEED].replace(gelu, at=QKV_MATCH), f"found in '{ATTENTION}'"),
    "no graph": (without_graph, lambda s: s["0"].replace(gelu, at=Match("0", ("x",))), "this module has no graph"),
    "stale": (taken, replace_qkv(), "the match qkv(q_proj, k_proj, v_proj) is not in the graph any more", "find again"),
    "stale node": (
        None,
        lambda s: s[FEED].replace(gelu, at=Match(FEED, ("gelu_7",))),
        "the match node(gelu_7) is not in the graph any more",
    ),
    # what replaces it
    "no function": (None, lambda s: s[FEED].replace(3, at=GELU_MATCH), "new is a int", "pass a function"),
    "module without name": (None, lambda s: s[FEED].replace(nn.GELU(), at=GELU_MATCH), "a module needs a name"),
    "mapping without name": (
        None,
        lambda s: s[FEED].replace(gelu, at=GELU_MATCH, mapping={}),
        "a mapping fills the parameters of a new module, which needs a name",
    ),
    "name without match": (None, lambda s: s[FEED].replace(nn.GELU(), name="act"), "name= is for a module that takes"),
    "name taken": (None, replace_qkv(name="o_proj"), "Attention has 'o_proj' already", "another name"),
    "name of an attribute": (None, replace_qkv(name="p"), "Attention has 'p' already"),
    "no module": (
        None,
        replace_qkv(new=lambda attention: torch.zeros(3)),
        "with name=, new must be a module or a function that makes one",
    ),
    "another shape": (
        None,
        lambda s: s[FEED].replace(lambda x: x[..., :3], at=GELU_MATCH),
        "gives float64[",
        "the match gives float64[",
    ),
    "another dtype": (
        None,
        lambda s: s[FEED].replace(lambda x: functional.gelu(x).float(), at=GELU_MATCH),
        "gives float32[",
        "the match gives float64[",
    ),
    "too many": (
        None,
        lambda s: s[FEED].replace(lambda x, residual: (x, x, x), at=Match(FEED, ("drop", "add"), drop_and_add)),
        "gives float64[",
        "the match gives float64[",
    ),
    "none that is used": (
        None,
        lambda s: s[FEED].replace(lambda x: None, at=GELU_MATCH),
        "gives a NoneType; the match gives float64[",
        "a value that only leaves the module may become None",
    ),
    "does not run": (
        None,
        lambda s: s[FEED].replace(lambda x: x @ x, at=GELU_MATCH),
        "<lambda> does not run on the inputs of the match: RuntimeError",
    ),
    "other arguments": (
        None,
        lambda s: s[FEED].replace(lambda x, y: x, at=GELU_MATCH),
        "does not run on the inputs of the match: TypeError",
    ),
    "module of another shape": (
        None,
        replace_qkv(new=nn.Linear(8, 25)),
        "'weight' is [25, 8], but its weights make [24, 8]",
    ),
    # weights
    "weights lost": (
        None,
        lambda s: s[FEED].replace(lambda x: torch.cat([x, x[..., :4]], -1), at=UP_MATCH),
        "the weights of 'up' would be used by nothing",
        "name= and mapping=",
    ),
    "half of the weights lost": (
        None,
        lambda s: s[ATTENTION].replace(lambda x: (x, x, x), at=QKV_MATCH),
        "the weights of 'q_proj' would be used by nothing",
    ),
    "no mapping": (None, replace_qkv(mapping=None), "nothing says what 'weight' of the new module"),
    "bias forgotten": (
        None,
        replace_qkv(new=same_shapes, mapping={"weight": QKV["weight"]}),
        "the weights of 'q_proj.bias' are used 0 times",
    ),
    "twice": (
        None,
        replace_qkv(mapping={**QKV, "bias": cat(["q_proj.bias", "q_proj.bias", "v_proj.bias"])}),
        "the weights of 'q_proj.bias' are used 2 times",
        "the weights of 'k_proj.bias' are used 0 times",
    ),
    "unknown source": (
        None,
        replace_qkv(mapping={**QKV, "bias": cat(["q_proj.bias", "k_proj.bias", "vproj.bias"])}),
        "'bias' is made of 'vproj.bias', which does not exist",
        "'v_proj.bias'",
    ),
    "source outside of the match": (
        None,
        replace_qkv(mapping={**QKV, "bias": cat(["q_proj.bias", "k_proj.bias", "o_proj.bias"])}),
        "'bias' is made of 'o_proj.bias', which does not exist",
    ),
    "unknown target": (None, replace_qkv(mapping={**QKV, "wait": "q_proj.bias"}), "fills 'wait', which"),
    "another order of shapes": (
        None,
        replace_qkv(mapping={**QKV, "weight": transpose(QKV["weight"])}),
        "'weight' is [24, 8], but its weights make [8, 24]",
    ),
    # what was done to the children
    "hook": (hooked, replace_qkv(), "'k_proj' has hooks, which would not be called any more", "remove them first"),
    "backward hook": (backward_hooked, replace_qkv(), "'k_proj' has hooks, which would not be called any more"),
    "sync": (
        synced,
        replace_qkv(),
        "other primitives have changed 'k_proj', whose call would go",
        "replace before them",
    ),
    "own random stream": (
        forked,
        lambda s: s[FEED].replace(lambda x, residual: x, at=END_MATCH),
        "other primitives have changed 'drop', whose call would go",
    ),
    "sharded": (
        sharded,
        replace_qkv(),
        f"{ATTENTION}.k_proj.weight, {ATTENTION}.k_proj.bias is sharded",
        "replace before shard",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_replacement_changes_nothing(case):
    setup, call, *message = REFUSALS[case]
    sch = create_schedule(net(), Mesh(tp=2))
    for path in (ATTENTION, FEED):
        sch[path].trace(inputs=batch())
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def tied_outside(model):
    model[1].attn.q_proj.weight = model[0].attn.q_proj.weight


def tied_inside(model):
    model[0].attn.k_proj.weight = model[0].attn.q_proj.weight


def child_of_two(model):
    model[1].attn.q_proj = model[0].attn.q_proj


@pytest.mark.parametrize("tie", [tied_outside, tied_inside, child_of_two])
def test_weights_that_would_come_apart_are_refused(tie):
    model = net(layers=2)
    tie(model)
    sch = create_schedule(model)
    sch[ATTENTION].trace(inputs=batch())
    assert_refused(sch, replace_qkv(), "would come apart")


def test_tie_survives_a_parameter_that_is_taken_over_whole():
    def another_linear(feed):
        return nn.Linear(8, 12, device="meta", dtype=torch.float64)

    model, dense = net(layers=2), net(layers=2)
    for each in (model, dense):
        each[1].feed.up.weight = each[0].feed.up.weight
    sch = create_schedule(model)
    feed = sch[FEED].trace(inputs=batch())
    feed.replace(another_linear, at=feed.match(up), name="wide", mapping={n: f"up.{n}" for n in ("weight", "bias")})
    assert model[0].feed.wide.weight is model[1].feed.up.weight
    assert_trains_like(sch, dense, batch())


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) * 2


def normed(x):
    return module("norm")(x)


def test_buffers_that_would_be_lost_are_refused():
    sch = create_schedule(WithBuffers())
    sch.trace(inputs={"x": torch.zeros(3, 4)})
    names = {name: f"norm.{name}" for name in ("weight", "bias")}
    at = sch.match(normed)
    assert_refused(
        sch, lambda s: s.replace(nn.LayerNorm(4), at=at, name="new", mapping=names), "'norm' has buffers, which"
    )


class Reused(nn.Module):
    """Calls one child in two places."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return functional.relu(self.fc(functional.gelu(self.fc(x))))


def reused():
    torch.manual_seed(0)
    return Reused()


def first_call(x, weight, bias):
    return functional.gelu(functional.linear(x, weight, bias))


def one_call(x):
    return functional.gelu(module("fc")(x))


def test_child_that_is_called_elsewhere_as_well_stays():
    sch = create_schedule(reused())
    sch.trace(inputs={"x": torch.zeros(2, 4)})
    sch.replace(first_call, at=sch.match(first_call))
    assert targets(sch.graphs()[0]) == ["first_call", "fc", "relu"]
    assert_trains_like(sch, reused(), {"x": torch.randn(3, 4)}, 1e-6)
    assert_replays(sch, reused())


def test_weights_of_a_child_that_is_called_elsewhere_as_well_do_not_move():
    sch = create_schedule(reused())
    sch.trace(inputs={"x": torch.zeros(2, 4)})
    at, mapping = sch.match(one_call), {name: f"fc.{name}" for name in ("weight", "bias")}
    assert_refused(
        sch,
        lambda s: s.replace(nn.Linear(4, 4), at=at, name="new", mapping=mapping),
        "'weight' is made of 'fc.weight', which does not exist",
    )


def linear(x, weight, bias):
    return functional.linear(x, weight, bias)


def linear_by_hand(x, weight, bias):
    return (x.unsqueeze(-2) * weight).sum(-1) + bias


def split_and_summed(s):
    s["0.feed.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(s)


def test_sync_of_a_child_whose_weights_a_function_uses_is_not_lost():
    """The graph does not call the child, so nobody would sum the ranks' parts: refused, at the latest by build."""
    sch = create_schedule(net(), Mesh(tp=2))
    feed = sch[FEED].trace(inputs=batch())
    [_, down] = feed.find(linear)
    feed.replace(linear_by_hand, at=down)
    feed["up"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    with pytest.raises(ScheduleError, match="down"):
        split_and_summed(sch)


class Heads(nn.Module):
    """Asks a child for its weight, which a graph cannot do for it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, twice: bool = False):
        if twice:
            return self.two(self.one(x))
        return self.one(x) + self.two(x)


def heads():
    torch.manual_seed(0)
    return Heads()


def both(x):
    return module("one")(x), module("two")(x)


BOTH = {name: cat([f"one.{name}", f"two.{name}"]) for name in ("weight", "bias")}


def test_new_kind_of_call_that_uses_the_old_weights_in_another_way_fails_loudly():
    sch = create_schedule(heads())
    sch.trace(inputs={"x": torch.zeros(2, 4)})
    sch.replace(nn.Linear(4, 8), at=sch.match(both), name="both", mapping=BOTH)
    x = torch.randn(3, 4)
    torch.testing.assert_close(sch.module(x), heads()(x))
    with pytest.raises(GuardError, match=r"no graph of Heads .* is good for this call, and none can be made"):
        sch.module(x, twice=True)
    torch.testing.assert_close(sch.module(x), heads()(x))
