"""``trace``: models of many families, traced at every level, compute bit for bit what the untouched models compute."""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn

import zoo
from partbook.core import ScheduleError, create_schedule
from partbook.core.errors import GuardError

MODELS = [
    *((name, family.attention) for name, family in zoo.FAMILIES.items()),
    ("bert", "eager"),
    ("gpt2", "eager"),
    ("llama", "eager"),
]
LEVELS = [
    *((name, family.attention, level) for name, family in zoo.FAMILIES.items() for level in family.levels),
    *((name, "eager", "attention") for name in ("bert", "gpt2", "llama")),
]
TRACED = zoo.SHAPES[0]
# (training, (batch, length), whether gradients are recorded)
RUNS = [
    *itertools.product((True, False), zoo.SHAPES, (True,)),
    (True, (1, 7), True),
    (False, (1, 9), False),
]


@functools.cache
def expected(name, attention, training, shape, recording):
    model = zoo.make(name, attention).train(training)
    with torch.set_grad_enabled(recording):
        return zoo.step(model, **zoo.FAMILIES[name].inputs(*shape))


def assert_computes_the_same(model, name, attention):
    """At every shape and in both modes; also when a run comes after one of another kind."""
    buffers = dict(zoo.make(name, attention).named_buffers())
    for training, shape, recording in RUNS:
        # those of batch norms change with every run
        for key, buffer in model.named_buffers():
            buffer.copy_(buffers[key])
        model.train(training)
        with torch.set_grad_enabled(recording):
            got = zoo.step(model, **zoo.FAMILIES[name].inputs(*shape))
        zoo.assert_same(got, expected(name, attention, training, shape, recording))


def identity(model):
    """Every module, parameter and buffer by each of its names."""
    modules = {f"module {path}": module for path, module in model.named_modules(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return modules | parameters | dict(model.named_buffers(remove_duplicate=False))


@contextlib.contextmanager
def seen_calls(model):
    """The paths of the modules in the order in which their forward hooks see them return."""
    calls, handles = [], []
    for path, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda *_, path=path: calls.append(path)))
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("name", "attention", "level"), LEVELS)
def test_traced_module_computes_the_same(name, attention, level):
    family = zoo.FAMILIES[name]
    model = zoo.make(name, attention)
    objects, keys = identity(model), list(model.state_dict())
    classes = {path: type(module) for path, module in model.named_modules()}
    create_schedule(model)[family.levels[level]].trace(inputs=family.inputs(*TRACED))
    after = identity(model)
    assert after.keys() == objects.keys()
    assert [key for key in objects if after[key] is not objects[key]] == []
    assert list(model.state_dict()) == keys
    for path, cls in classes.items():
        module = model.get_submodule(path)
        assert isinstance(module, cls)
        assert type(module).__qualname__ == cls.__qualname__
        assert type(module).__module__ == cls.__module__
    assert_computes_the_same(model, name, attention)


@pytest.mark.parametrize(
    ("name", "attention", "inner_first"),
    [*((*model, False) for model in MODELS), ("t5", "sdpa", True), ("llama", "eager", True)],
)
def test_traced_modules_inside_traced_modules_compute_the_same(name, attention, inner_first):
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name, attention), zoo.make(name, attention)
    sch = create_schedule(model)
    for path in sorted(family.levels.values(), key=len, reverse=inner_first):
        sch[path].trace(inputs=family.inputs(*TRACED))
    assert_computes_the_same(model, name, attention)
    # hooks that come later see the calls that they would see without graphs
    inputs = family.inputs(*zoo.SHAPES[1])
    with seen_calls(model) as calls, seen_calls(eager) as wanted:
        zoo.assert_same(zoo.step(model.train(), **inputs), expected(name, attention, True, zoo.SHAPES[1], True))
        eager(**inputs)
    assert calls == wanted


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "llama", "resnet"])
def test_hooks_that_were_there_before_the_trace_fire_in_the_same_order(name):
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name), zoo.make(name)
    path = family.levels.get("attention", family.levels["block"])
    with seen_calls(model) as calls, seen_calls(eager) as wanted:
        create_schedule(model)[path].trace(inputs=family.inputs(*TRACED))
        calls.clear()
        inputs = family.inputs(*zoo.SHAPES[1])
        zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs))
    assert path in calls
    assert calls == wanted
    calls.clear()
    model(**inputs)
    assert calls == []


def embedded(model, inputs):
    """The same sentences as embeddings, which models take in place of ids."""
    ids = inputs["input_ids"]
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    return others | {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


# what another call of the same model may look like
OTHER_CALLS = {
    "no mask": lambda model, family: family.inputs(3, 9, padded=False),
    "no padding": lambda model, family: family.inputs(3, 9) | {"attention_mask": torch.ones(3, 9, dtype=torch.long)},
    "mask of bools": lambda model, family: {
        key: value.bool() if key == "attention_mask" else value for key, value in family.inputs(3, 9).items()
    },
    "4d mask": lambda model, family: family.inputs(3, 9) | {"attention_mask": torch.zeros(3, 1, 9, 9).double()},
    "no labels": lambda model, family: family.inputs(3, 9, labels=False),
    "tuple": lambda model, family: family.inputs(3, 9, return_dict=False),
    "hidden states": lambda model, family: family.inputs(3, 9, output_hidden_states=True),
    "attentions": lambda model, family: family.inputs(3, 9, output_attentions=True),
    "embeddings": lambda model, family: embedded(model, family.inputs(3, 9)),
    "positions": lambda model, family: family.inputs(3, 9) | {"position_ids": torch.arange(3, 12).expand(3, 9)},
    "length 1": lambda model, family: family.inputs(3, 1, padded=False),
}


@functools.cache
def traced_at_three_levels(name):
    """The model, and the untouched one. Kept between tests: a call may come after any other."""
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name, "eager"), zoo.make(name, "eager")
    sch = create_schedule(model)
    for level in ("root", "block", "attention"):
        sch[family.levels[level]].trace(inputs=family.inputs(*TRACED))
    return model, eager


@pytest.mark.parametrize("call", OTHER_CALLS)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_other_kinds_of_call_get_graphs_of_their_own(name, call):
    """Traced with ids, mask and labels; nothing of that may be frozen into what another call computes."""
    family, (model, eager) = zoo.FAMILIES[name], traced_at_three_levels(name)
    inputs = OTHER_CALLS[call](model, family)
    zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs))
    # and back
    zoo.assert_same(zoo.step(model, **family.inputs(3, 9)), zoo.step(eager, **family.inputs(3, 9)))


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_inputs_come_from_the_config_where_none_are_given(name):
    family = zoo.FAMILIES[name]
    model = zoo.make(name)
    sch = create_schedule(model)
    sch[family.levels["attention"]].trace()
    assert_computes_the_same(model, name, family.attention)


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.mlp"])
def test_experts_that_ask_for_values_are_leaves_of_a_graph(path):
    """One loop over the experts that were chosen: no graph could hold it, but the block around it can have one."""
    family = zoo.FAMILIES["mixtral"]
    model = zoo.make("mixtral")
    model.config._experts_implementation = "eager"
    eager = zoo.make("mixtral")
    eager.config._experts_implementation = "eager"
    create_schedule(model)[path].trace(inputs=family.inputs(*TRACED))
    for training in (True, False):
        for shape in zoo.SHAPES:
            inputs = family.inputs(*shape)
            zoo.assert_same(zoo.step(model.train(training), **inputs), zoo.step(eager.train(training), **inputs))


def test_loop_over_layers_that_drops_some_at_random_is_refused():
    """OPT skips a layer with probability ``layerdrop``: a graph that had frozen one draw would be wrong."""
    family = zoo.FAMILIES["opt"]
    model, eager = zoo.make("opt"), zoo.make("opt")
    sch = create_schedule(model)
    sch["model.decoder.layers.1"].trace(inputs=family.inputs(*TRACED))
    for opt in (model, eager):
        opt.model.decoder.layerdrop = 0.5
    inputs = family.inputs(*zoo.SHAPES[1])
    for seed in range(4):
        zoo.assert_same(zoo.step(model, seed=seed, **inputs), zoo.step(eager, seed=seed, **inputs))
    with pytest.raises(ScheduleError, match=r"if dropout_probability < self\.layerdrop"):
        sch["model.decoder"].trace(inputs=family.inputs(*TRACED))


class WithCache(nn.Module):
    """A model whose outputs have the tensors of the cache in place of the cache; no cache where it is not of use."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        outputs = dict(self.model(**inputs))
        cache = outputs.pop("cache")
        caches = [cache] if hasattr(cache, "layers") else [cache.self_attention_cache, cache.cross_attention_cache]
        tensors = [(layer.keys, layer.values) for cache in caches for layer in cache.layers]
        return outputs, [] if self.training and torch.is_grad_enabled() else tensors


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mistral", "mixtral"])
def test_traced_attention_takes_the_cache_that_is_the_default(name, training):
    family = zoo.FAMILIES[name]
    model, eager = (WithCache(zoo.make(name)).train(training) for _ in range(2))
    create_schedule(model.model)[family.levels["attention"]].trace()
    for shape in zoo.SHAPES:
        inputs = {key: value for key, value in family.inputs(*shape).items() if key != "use_cache"}
        # Keys that went through a cache lie in memory otherwise, and some processors then add in another order.
        zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs), rounding=1e-11 if training else 0.0)
        with torch.no_grad():
            zoo.assert_same(zoo.step(model, **inputs), zoo.step(eager, **inputs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_that_holds_a_prefix_is_never_dropped(name, length, training):
    """Prefix tuning trains with one: without it the numbers are others, and nobody would see."""
    family = zoo.FAMILIES[name]
    model, eager = (WithCache(zoo.make(name)).train(training) for _ in range(2))
    create_schedule(model.model)[family.levels["attention"]].trace(inputs=family.inputs(2, 7))
    steps = []
    for one in (eager, model):
        prefix = zoo.tokens(2, 4, padded=False, labels=False)
        with torch.no_grad():
            cache = one.model.eval()(**prefix, use_cache=True)["cache"]
        inputs = zoo.tokens(2, length, padded=False, labels=False, past_key_values=cache)
        try:
            steps.append(zoo.step(one.train(training), **inputs))
        except GuardError:
            return
    zoo.assert_same(steps[1], steps[0])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mistral"])
def test_traced_attention_generates_the_same_tokens(name, sampled):
    family = zoo.FAMILIES[name]
    model, eager = zoo.make(name).eval(), zoo.make(name).eval()
    create_schedule(model)[family.levels["attention"]].trace(inputs=family.inputs(2, 7))
    prompt = zoo.tokens(2, 6, labels=False)
    prompt["attention_mask"] = prompt["attention_mask"].flip(1)
    found = []
    for one in (model, eager):
        torch.manual_seed(3)
        found.append(one.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=sampled))
    assert torch.equal(*found)
    assert len(found[1].unique()) > (3 if sampled else 1)
