"""``replace`` and ``replace_all``: another module with the same weights, all of them, or no change at all."""

import copy

import pytest
import torch
from torch import nn

import models
from partbook.core import Mesh, cat, create_schedule, transpose
from partbook.schedules.fused import QKV, fuse_qkv, mapping
from replays import assert_refused, assert_replays


class Transposed(nn.Module):
    """A linear that keeps its weight as (in, out)."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        return x @ self.matrix + (0 if self.bias is None else self.bias)


class Counted(nn.GELU):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


def transposed(old):
    return Transposed(old.in_features, old.out_features, old.bias is not None)


def same_class(old):
    return nn.Linear(old.in_features, old.out_features, old.bias is not None, device="meta")


def fast_gelu(old):
    return nn.GELU(approximate="tanh")


def counted(old):
    return Counted()


TO_TRANSPOSED = {"matrix": transpose("weight")}
ids = torch.tensor([[0, 5, 9, 3]])


def toy(tp=1, **options):
    return create_schedule(models.Toy(**options).eval(), Mesh(tp=tp))


def test_new_module_computes_the_same_with_the_old_weights():
    sch, dense = toy(), models.Toy().eval()
    sch["up"].replace(transposed, TO_TRANSPOSED)
    assert isinstance(sch["up"].module, Transposed)
    torch.testing.assert_close(sch.module(ids), dense(ids))
    assert torch.equal(sch.module.up.matrix, dense.up.weight.t())
    assert sch.state.weights["up.matrix"] == transpose("up.weight")
    assert sch.history[0].primitive.as_call() == "replace(new=transposed, mapping={'matrix': transpose('weight')})"
    assert_replays(sch, models.Toy().eval())


def test_parameter_of_the_same_name_stays_the_same_object():
    sch = toy()
    weight, bias = sch.module.up.weight, sch.module.up.bias
    sch["up"].replace(same_class)
    assert sch.module.up.weight is weight
    assert sch.module.up.bias is bias
    assert_replays(sch, models.Toy().eval())


def test_tie_survives_the_replacement_of_one_owner():
    sch = toy()
    sch["head"].replace(same_class)
    assert sch.module.head.weight is sch.module.words.weight
    assert_replays(sch, models.Toy().eval())


def test_mode_frozen_parameters_and_buffers_are_kept():
    sch = create_schedule(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    sch.module[0].running_mean.fill_(7)
    sch.module[1].weight.requires_grad_(False)
    sch.module.eval()
    sch["0"].replace(lambda old: nn.BatchNorm1d(4, eps=1e-3))
    sch["1"].replace(transposed, TO_TRANSPOSED)
    assert sch.module[0].running_mean.tolist() == [7] * 4
    assert not sch.module[0].training
    assert not sch.module[1].matrix.requires_grad
    assert sch.module[1].bias.requires_grad


def test_a_module_is_copied_in_so_that_it_can_serve_again():
    sch, new = toy(), nn.Linear(8, 12)
    sch["up"].replace(new)
    assert sch.module.up is not new
    with pytest.raises(ValueError, match="new is a Linear, which cannot be saved as text"):
        sch.history.to_json()


def test_lambda_is_refused_on_saving_only():
    sch = toy()
    sch["act"].replace(lambda old: nn.ReLU())
    with pytest.raises(ValueError, match="cannot be imported by that name"):
        sch.history.to_json()


def test_annotations_follow_the_parameter():
    sch = toy()
    sch["up"].annotate("weight", "decay", 0.1).annotate("bias", "decay", 0.0)
    sch["up"].replace(transposed, TO_TRANSPOSED)
    # the bias is the same parameter, the matrix is another one
    assert sch.state.annotations == {"up.bias": {"decay": 0.0}}


def test_replacement_of_a_replacement_is_made_of_the_original():
    sch, dense = toy(), models.Toy().eval()
    sch["up"].replace(transposed, TO_TRANSPOSED)
    sch["up"].replace(nn.Linear(8, 12), {"weight": transpose("matrix")})
    assert sch.state.weights["up.weight"] == transpose(transpose("up.weight"))
    assert torch.equal(sch.module(ids), dense(ids))


@pytest.mark.parametrize("make", [models.llama, models.qwen2])
def test_fused_qkv_computes_the_same_and_then_splits_by_segments(make):
    dense, sch = make().eval().double(), create_schedule(make().eval().double())
    for attn in sch.select("**.self_attn"):
        attn.replace(fuse_qkv, mapping(attn.module, QKV, "qkv_proj"))
    batch = models.batch()
    torch.testing.assert_close(sch.module(**batch).logits, dense(**batch).logits)
    names = [f"model.layers.0.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
    assert sch.state.weights["model.layers.0.self_attn.qkv_proj.weight"] == cat(names)
    assert_replays(sch, make().eval().double())


def with_plan(sch):
    sch["up"].checkpoint()


def sharded(sch):
    sch["up"].shard("weight", axis=0)


def sharded_tie(sch):
    sch["words"].shard("weight", axis=0)


REFUSALS = [
    (None, lambda s: s.replace(nn.Linear(1, 1)), "the whole model cannot be replaced", "schedule the other model"),
    (with_plan, lambda s: s["up"].replace(same_class), "other primitives have changed 'up'", "replace before them"),
    (
        sharded,
        lambda s: s["up"].replace(same_class),
        "other primitives have changed 'up.weight'",
        "replace before them",
    ),
    (sharded_tie, lambda s: s["head"].replace(same_class), "other primitives have changed", "words.weight"),
    (None, lambda s: s["up"].replace(lambda old: None), "the new module is a NoneType", "pass a module or a function"),
    (None, lambda s: s["up"].replace(transposed), "nothing says what 'matrix'", "weights of 'weight' are used 0 times"),
    (
        None,
        lambda s: s["up"].replace(transposed, {"matrx": transpose("weight")}),
        "fills 'matrx', which the new",
        "'matrix'",
    ),
    (
        None,
        lambda s: s["up"].replace(transposed, {"matrix": transpose("wait")}),
        "made of 'wait', which does not exist",
        "'weight'",
    ),
    (
        None,
        lambda s: s["up"].replace(transposed, {"matrix": "weight"}),
        "'matrix' is [8, 12], but its weights make [12, 8]",
    ),
    (
        None,
        lambda s: s["up"].replace(nn.Linear(8, 12, bias=False)),
        "the weights of 'bias' are used 0 times",
        "exactly once",
    ),
    (None, lambda s: s["up"].replace(transposed, {"matrix": cat(["weight", "weight"])}), "'weight' are used 2 times"),
    (
        None,
        lambda s: s["up"].replace(transposed, {"matrix": transpose("bias"), "bias": "weight"}),
        "cannot transpose shape (12,)",
    ),
    (None, lambda s: s["up"].replace(nn.Linear(8, 13)), "nothing says what 'weight'", "nothing says what 'bias'"),
    (
        None,
        lambda s: s["head"].replace(transposed, TO_TRANSPOSED),
        "weight is tied to a parameter outside and would come apart",
    ),
    (
        lambda s: s["act"].replace(counted),
        lambda s: s["act"].replace(nn.GELU()),
        "the new module lacks the buffer 'count'",
    ),
    (
        None,
        lambda s: s["act"].replace(Counted().to("meta")),
        "buffer 'count' is on the meta device and the old module has none",
    ),
]


@pytest.mark.parametrize(("setup", "call", "message"), [(setup, call, text) for setup, call, *text in REFUSALS])
def test_replacement_that_would_lose_or_invent_weights_is_refused(setup, call, message):
    sch = toy(tp=2)
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def with_shared():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.ReLU(), shared)


def test_replacing_a_module_that_also_stands_elsewhere_is_refused():
    """The other place would keep the old module, and weights that nothing accounts for."""
    sch = create_schedule(with_shared())
    shared = sch.module[0]
    for path in ("0", "2"):
        assert_refused(sch, lambda s, path=path: s[path].replace(transposed, TO_TRANSPOSED), "would come apart")
    # with the same parameters there is nothing that could
    sch["0"].replace(same_class)
    assert sch.module[0].weight is shared.weight
    assert_replays(sch, with_shared())


def linears():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 2)), nn.GELU())


def is_small(module):
    return isinstance(module, nn.Linear) and module.out_features < 4


@pytest.mark.parametrize(
    ("which", "make", "mapping", "replaced"),
    [
        (nn.GELU, fast_gelu, None, {"1.0", "2"}),
        (nn.Linear, transposed, TO_TRANSPOSED, {"0", "1.1"}),
        ("1.*", copy.deepcopy, None, {"1.0", "1.1"}),
        (is_small, transposed, TO_TRANSPOSED, {"1.1"}),
        # what is inside a match goes with it
        (nn.Sequential, copy.deepcopy, None, {"1", "1.0", "1.1"}),
    ],
)
def test_replace_all_finds_types_globs_and_predicates(which, make, mapping, replaced):
    torch.manual_seed(0)
    model, fresh = linears(), None
    fresh = copy.deepcopy(model)
    before, x = dict(model.named_modules()), torch.randn(3, 4)
    expected = model(x)
    sch = create_schedule(model)
    sch.replace_all(which, make, mapping)
    assert {path for path, module in model.named_modules() if module is not before[path]} == replaced
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    assert len(sch.history) == 1
    assert_replays(sch, fresh)


def second_fails(old):
    return nn.Linear(old.in_features, old.out_features, bias=old.out_features > 3)


def test_replace_all_replaces_all_or_nothing():
    sch = create_schedule(linears())
    assert_refused(sch, lambda s: s.replace_all(nn.Linear, second_fails), "1.1: the weights of 'bias' are used 0 times")
    assert_refused(sch, lambda s: s.replace_all(nn.Conv2d, copy.deepcopy), "nothing below 'the model' matches")
    assert_refused(sch, lambda s: s["1"].replace_all("2", copy.deepcopy), "nothing below '1' matches")
