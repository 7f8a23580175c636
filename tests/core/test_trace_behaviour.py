"""``trace``: what it says where it refuses, what it leaves alone, and how a traced module lives on."""

import copy
import random

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models
import zoo
from partbook.core import History, ScheduleError, create_schedule
from partbook.core.errors import GuardError
from replays import assert_refused, assert_replays, content

x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def with_middle(forward, **children):
    """A model of three modules, whose middle one has this forward; x (B, S, 8) -> (B, S, 8)."""
    torch.manual_seed(0)
    middle = type("Middle", (nn.Module,), {"forward": forward})()
    for name, child in ({"fc": nn.Linear(8, 8)} | children).items():
        setattr(middle, name, child)
    return nn.Sequential(nn.Linear(8, 8), middle, nn.LayerNorm(8))


def trace(sch, path="1"):
    return sch[path].trace(inputs={"input": x})


def assert_same_at_other_shapes(traced, eager):
    for training in (True, False):
        for batch, length in ((2, 5), (7, 3), (1, 1)):
            traced.train(training)
            eager.train(training)
            inputs = torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(1))
            zoo.assert_same(zoo.step(traced, (inputs,)), zoo.step(eager, (inputs.clone(),)))


def value_branch(self, x):
    y = self.fc(x)
    if y.sum() > 0:
        return y
    return -y


def item(self, x):
    largest = x.max().item()
    return self.fc(x) / largest


def nonzero(self, x):
    rows = x.sum((1, 2)).nonzero()
    return x * len(rows)


def to_numpy(self, x):
    return x * float(x.detach().numpy().max())


def counter(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.fc(x) * self.calls


def keeps(self, x):
    self.last = y = self.fc(x)
    return y


MADE = {}


def made_elsewhere(self, x):
    return self.fc(x) + MADE["y"]


def fails(self, x):
    return self.fc(x) @ x


# (forward, the line of it that cannot be traced, what the message says besides)
UNTRACEABLE = [
    (value_branch, 2, "if y.sum() > 0:", ""),
    (item, 1, "largest = x.max().item()", "item"),
    (nonzero, 2, "return x * len(rows)", ""),
    (to_numpy, 1, "x.detach().numpy()", "numpy"),
    (counter, None, "", "calls"),
    (keeps, None, "", "last"),
    (made_elsewhere, 1, 'MADE["y"]', ""),
    (fails, 1, "self.fc(x) @ x", "its forward fails: RuntimeError"),
]


@pytest.mark.parametrize(("forward", "line", "source", "word"), UNTRACEABLE, ids=[f.__name__ for f, *_ in UNTRACEABLE])
def test_refusal_names_the_module_the_users_line_and_the_construct(forward, line, source, word):
    model = with_middle(forward)
    # what a module before it left behind, which no graph of the middle can know
    model[0].register_forward_hook(lambda module, args, out: MADE.update(y=out.detach() * 2))
    place = f"test_trace_behaviour.py:{forward.__code__.co_firstlineno + line}" if line else ""
    sch = create_schedule(model)
    assert_refused(sch, lambda s: s["1"].trace(inputs={"input": x}), "sch['1'].trace(", "'1'", place, source, word)
    assert not hasattr(model[1], "calls")
    assert not hasattr(model[1], "last")


def test_trace_that_cannot_run_the_model_is_refused():
    sch = create_schedule(with_middle(lambda self, x: self.fc(x), unused=nn.Linear(2, 2)))
    assert_refused(sch, lambda s: s["1.unused"].trace(inputs={"input": x}), "1.unused", "call")
    assert_refused(sch, lambda s: s["1"].trace(inputs={"inputs": x}), "inputs")
    assert_refused(sch, lambda s: s["1"].trace(), "inputs")
    sch = create_schedule(zoo.make("llama"))
    assert_refused(sch, lambda s: s["model.layers"].trace(), "model.layers", "ModuleList")


def test_new_kind_of_call_that_cannot_be_traced_is_refused_when_it_comes():
    """And the kinds that have a graph still run."""

    def forward(self, x):
        return self.fc(x) if x.shape[1] > 3 else self.fc(x) * x.max().item()

    model = with_middle(forward)
    eager = copy.deepcopy(model)
    trace(create_schedule(model))
    with pytest.raises(GuardError, match=r"item") as caught:
        model(x[:, :3])
    assert f"test_trace_behaviour.py:{forward.__code__.co_firstlineno + 1}" in str(caught.value)
    assert "'1'" in str(caught.value)
    zoo.assert_same(zoo.step(model, (x,)), zoo.step(eager, (x,)))


class Keeper(nn.Module):
    """A leaf that changes itself in every forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("sums", torch.zeros(8))
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.last = x.detach()
        self.seen.append(tuple(x.shape))
        self.sums = self.sums + x.detach().sum((0, 1))
        return self.norm(F.dropout(x.mT, 0.5)).mT * self.calls + self.sums


def test_trace_runs_the_model_without_a_trace_in_it():
    """Random streams, statistics, gradients, modes and what a leaf keeps are as they were."""
    model = with_middle(lambda self, x: self.drop(self.keeper(self.fc(x))), keeper=Keeper(), drop=nn.Dropout(0.3))
    model[1].drop.eval()
    zoo.step(model, (x,))
    eager = copy.deepcopy(model)
    before, attributes = content(model), dict(vars(model[1].keeper))
    random.seed(1)
    numpy.random.seed(1)
    streams = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    with torch.no_grad():
        trace(create_schedule(model))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), repr(numpy.random.get_state())) == streams[1:]
    assert {**content(model), "attributes": 0} == {**before, "attributes": 0}
    assert vars(model[1].keeper).keys() == attributes.keys()
    assert all(vars(model[1].keeper)[key] is value for key, value in attributes.items())
    assert model[1].keeper.seen == [(2, 5, 8)]
    assert [module.training for module in model.modules()] == [module.training for module in eager.modules()]
    inputs = torch.randn(4, 3, 8)
    for _ in range(2):
        zoo.assert_same(zoo.step(model, (inputs,)), zoo.step(eager, (inputs.clone(),)))
    assert model[1].keeper.calls == eager[1].keeper.calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_at_the_trace_are_not_those_of_the_graph(mode):
    model = with_middle(lambda self, x: F.dropout(F.gelu(self.fc(x)), 0.2, self.training))
    eager = copy.deepcopy(model)
    with mode():
        trace(create_schedule(model))
    assert_same_at_other_shapes(model, eager)
    with torch.autocast("cpu", torch.bfloat16):
        zoo.assert_same(zoo.step(model, (x,)), zoo.step(eager, (x,)))
    with torch.no_grad():
        zoo.assert_same(zoo.step(model, (x,)), zoo.step(eager, (x,)))
    with torch.inference_mode():
        assert torch.equal(model.eval()(x), eager.eval()(x))


def test_model_on_meta_is_traced_and_filled_later():
    real = zoo.make("llama")
    model = models.on_meta(type(real), config=zoo.config_of("llama"))
    sch = create_schedule(model)
    inputs = zoo.FAMILIES["llama"].inputs(2, 7)
    for path in ("", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.0.self_attn"):
        sch[path].trace(inputs=inputs)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").double()
    model.load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():
        model.get_buffer(name).copy_(buffer)
    for shape in zoo.SHAPES:
        inputs = zoo.FAMILIES["llama"].inputs(*shape)
        zoo.assert_same(zoo.step(model, **inputs), zoo.step(real, **inputs))


@pytest.mark.parametrize("first", ["trace", "checkpointing"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing_still_recomputes(name, first):
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name), zoo.make(name)
    eager.gradient_checkpointing_enable()
    if first == "checkpointing":
        model.gradient_checkpointing_enable()
    sch = create_schedule(model)
    for level in ("root", "block", "feed_forward"):
        sch[family.levels[level]].trace(inputs=family.inputs(2, 7))
    if first == "trace":
        model.gradient_checkpointing_enable()
    calls = {"traced": 0, "eager": 0}
    for key, one in (("traced", model), ("eager", eager)):
        leaf = next(module for module in one.get_submodule(family.levels["feed_forward"]).children())
        leaf.register_forward_pre_hook(lambda *_, key=key: calls.update({key: calls[key] + 1}))
    inputs = family.inputs(3, 9)
    zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs))
    assert calls == {"traced": 2, "eager": 2}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_new_kind_of_call_inside_a_checkpointed_block_is_traced_there(name):
    """What the recording computes is nothing that the backward has to recompute."""
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name), zoo.make(name)
    create_schedule(model)[family.levels["attention"]].trace(inputs=family.inputs(2, 7))
    for one in (model, eager):
        one.gradient_checkpointing_enable()
    inputs = family.inputs(3, 9, padded=False)
    zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs))


def values_inside(x):
    return x * float(x.detach().max())


def test_function_that_is_a_leaf_may_ask_for_values():
    model = with_middle(lambda self, x: values_inside(self.fc(x)) + values_inside(x))
    eager = copy.deepcopy(model)
    sch = create_schedule(model)
    assert_refused(sch, lambda s: s["1"].trace(inputs={"input": x}), "return x * float(x.detach().max())", "leaves=")
    sch["1"].trace(inputs={"input": x}, leaves=(values_inside,))
    assert_same_at_other_shapes(model, eager)


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return y.reshape(-1, y.shape[-1]).sum() * y.shape[-1] + x


def test_modules_that_look_alike_do_not_share_what_their_hooks_make_different():
    """Their class, children and weights are alike, so a graph of one could pass for one of the other."""
    torch.manual_seed(0)
    model = nn.Sequential(Sized(), Sized(), Sized())
    for block, size in zip(model, (4, 2, 8), strict=True):
        block.fc.register_forward_hook(lambda module, args, out, size=size: out[..., :size])
    eager = copy.deepcopy(model)
    sch = create_schedule(model)
    for path in ("0", "1", "2"):
        trace(sch, path)
    assert_same_at_other_shapes(model, eager)


def test_copy_of_a_traced_model_is_one_of_its_own():
    family = zoo.FAMILIES["gpt2"]
    model, eager = zoo.make("gpt2"), zoo.make("gpt2")
    sch = create_schedule(model)
    for level in ("root", "block", "attention"):
        sch[family.levels[level]].trace(inputs=family.inputs(2, 7))
    other = copy.deepcopy(model)
    assert other.lm_head.weight is other.transformer.wte.weight
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    inputs = family.inputs(3, 9)
    expected = zoo.step(eager, **inputs)
    zoo.assert_same(zoo.step(other, **inputs), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.transformer.h[1].attn.register_forward_hook(lambda module, args, out: (out[0] * 0, *out[1:]))
    other.eval()
    zoo.assert_same(zoo.step(model, **inputs), expected)
    assert all(p.grad is not None for p in model.parameters())
    zoo.step(model, **inputs)
    assert all(torch.equal(p.grad, expected.gradients[n]) for n, p in model.named_parameters())


def test_trace_is_printed_saved_and_replayed():
    sch = create_schedule(zoo.make("bert"))
    path = zoo.FAMILIES["bert"].levels["attention"]
    assert sch[path].trace().path == path
    sch.trace()
    assert str(sch.history) == f"sch['{path}'].trace()\nsch.trace()"
    fresh = zoo.make("bert")
    assert_replays(sch, fresh)
    inputs = zoo.FAMILIES["bert"].inputs(3, 9)
    again = History.from_json(sch.history.to_json()).replay(zoo.make("bert")).module
    zoo.assert_same(zoo.step(again, **inputs), zoo.step(zoo.make("bert"), **inputs))


def test_traced_model_takes_a_second_trace_or_refuses_it():
    model = with_middle(lambda self, x: F.gelu(self.fc(x)))
    eager = copy.deepcopy(model)
    sch = create_schedule(model)
    trace(sch)
    try:
        trace(sch)
    except ScheduleError as error:
        assert "traced" in str(error)  # noqa: PT017
    assert_same_at_other_shapes(model, eager)


class Double(torch.autograd.Function):
    """Backward is not the derivative on purpose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Opaque(nn.Module):
    """What a graph of the module around it must not look into."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = Double.apply(self.fc(x)) + 0
        dist.all_reduce(y.detach())
        y += 1
        y[..., 0] = 0
        for row in (y.detach().sum((1, 2)) > 0).nonzero().flatten().tolist():
            y[row] *= 2
        return y


def all_reduced(module, args, out):
    dist.all_reduce(out)
    return out


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("path", ["", "1"])
def test_collectives_hooks_custom_gradients_and_writes_of_leaves_stay_opaque(path):
    def forward(self, x):
        batch, length, width = x.shape
        h = self.leaf(F.gelu(self.fc(x)))
        return h.view(batch * length, width).relu().view(batch, length, width) + x

    model = with_middle(forward, leaf=Opaque())
    leaf = model[1].leaf
    leaf.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    leaf.register_forward_hook(lambda module, args, out: torch.cat([out, out], -1)[..., 4:12])
    leaf.fc.register_forward_hook(all_reduced)
    leaf.fc.register_full_backward_hook(lambda module, inputs, outputs: tuple(grad * 2 for grad in inputs))
    eager = copy.deepcopy(model)
    trace(create_schedule(model), path)
    assert_same_at_other_shapes(model, eager)
