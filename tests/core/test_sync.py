"""``sync``: which collective fits which boundary; their numbers are in tests/distributed."""

import pytest

import models
from partbook.core import Mesh, create_schedule
from partbook.core.execution import plan_of
from partbook.core.overlap import OverlappedColumn
from replays import assert_refused, assert_replays


def double(x, group):
    return x * 2


def column(sch):
    sch["up"].shard("weight", axis=0).shard("bias", axis=0)


def row(sch):
    sch["down"].shard("weight", axis=1)


def vocabulary(sch):
    sch["words"].shard("weight", axis=0)


def features(sch):
    sch["words"].shard("weight", axis=1)


@pytest.mark.parametrize(
    ("setup", "path", "arguments"),
    [
        (row, "down", ("fwd_post", "all_reduce")),
        (row, "down", ("fwd_post", "reduce_scatter", 1)),
        (row, "down", ("fwd_post", double)),
        (column, "up", ("fwd_post", "all_gather", -1)),
        (column, "up", ("fwd_pre", "all_gather", 1)),
        (column, "up", ("bwd_post", double)),
        (vocabulary, "words", ("fwd_post", "all_reduce")),
        (vocabulary, "words", ("fwd_post", "reduce_scatter", 1)),
        (features, "words", ("fwd_post", "all_gather", 2)),
        (None, "norm", ("fwd_post", "all_gather", 1)),
        (None, "norm", ("fwd_pre", "scatter", 1, "input")),
        (None, "up", ("fwd_post", "scatter", 1)),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_fitting_sync_is_recorded_printed_and_replayed(setup, path, arguments, tp):
    sch = create_schedule(models.Toy(tied=False), Mesh(tp=tp))
    if setup:
        setup(sch)
    sch[path].sync(*arguments)
    [applied] = sch.state.syncs[path]
    assert applied.as_call() in str(sch)
    assert (applied.mode, applied.op) == arguments[:2]
    plan = plan_of(sch[path].module)
    # on a single rank there is nobody to talk to, and nothing runs around the module
    assert (
        [(sync.mode, sync.op) for sync in plan.syncs] == [(arguments[0], str(arguments[1]))] if tp > 1 else plan is None
    )
    assert_replays(sch, models.Toy(tied=False))


@pytest.mark.parametrize("tp", [1, 2])
def test_input_gradient_of_a_column_parallel_module_is_summed_by_its_own_kernel(tp):
    """Where the sum can run beside the weight gradient; elsewhere it is a step of its own."""
    sch = create_schedule(models.Toy(tied=False), Mesh(tp=tp))
    column(sch)
    sch["up"].sync("bwd_post", "all_reduce")
    plan = plan_of(sch["up"].module)
    assert (isinstance(plan.kernel, OverlappedColumn) and plan.syncs == ()) if tp > 1 else plan is None
    assert_replays(sch, models.Toy(tied=False))


def test_bias_of_a_reduce_scattered_output_gets_the_whole_gradient():
    """Each rank adds the bias to its own part of the sequence: its gradient is a part until the parts are summed."""
    sch = create_schedule(models.Toy(), Mesh(tp=2))
    row(sch)
    sch["down"].sync("fwd_post", "reduce_scatter", axis=1)
    assert plan_of(sch["down"].module).partial_gradients == {"bias": 2}
    assert "gradient of bias summed over 2" in str(sch["down"])


def gather_first(sch):
    column(sch)
    sch["up"].sync("fwd_pre", "all_gather", axis=1)


def reduced(sch):
    row(sch)
    sch["down"].sync("fwd_post", "all_reduce")


REFUSALS = [
    # closed choices
    (None, lambda s: s["up"].sync("fwd_past", "all_reduce"), "no mode 'fwd_past'", "'fwd_post'"),
    (None, lambda s: s["up"].sync("fwd_post", "allreduce"), "no op 'allreduce'", "'all_reduce'", "or pass a function"),
    (None, lambda s: s["up"].sync("fwd_pre", "all_gather", 1, "inputs"), "forward has no argument 'inputs'", "'input'"),
    (None, lambda s: s["up"].sync("fwd_pre", "all_reduce"), "would add its equal inputs", "all_gather or scatter"),
    (None, lambda s: s["up"].sync("fwd_pre", "reduce_scatter", axis=1), "would add its equal inputs"),
    # the axis
    (row, lambda s: s["down"].sync("fwd_post", "all_reduce", axis=1), "all_reduce takes no axis"),
    (
        row,
        lambda s: s["down"].sync("fwd_post", "reduce_scatter"),
        "reduce_scatter needs an axis",
        "axis=1 is the sequence",
    ),
    (None, lambda s: s["up"].sync("fwd_pre", "all_gather"), "all_gather needs an axis"),
    (None, lambda s: s["up"].sync("fwd_pre", "scatter"), "scatter needs an axis"),
    # a split output
    (
        column,
        lambda s: s["up"].sync("fwd_post", "all_reduce"),
        "different columns: all_reduce would add them",
        "all_gather with axis=-1",
    ),
    (
        column,
        lambda s: s["up"].sync("fwd_post", "reduce_scatter", axis=1),
        "different columns: reduce_scatter would add them",
    ),
    (
        column,
        lambda s: s["up"].sync("fwd_post", "all_gather", axis=1),
        "split along its last dim, not along 1",
        "axis=-1",
    ),
    (
        column,
        lambda s: s["up"].sync("fwd_post", "scatter", axis=1),
        "of different columns, scatter would keep different rows",
    ),
    (features, lambda s: s["words"].sync("fwd_post", "all_reduce"), "different columns: all_reduce would add them"),
    # a partial output
    (
        row,
        lambda s: s["down"].sync("fwd_post", "all_gather", axis=-1),
        "a partial sum, which all_gather would leave unsummed",
    ),
    (row, lambda s: s["down"].sync("fwd_post", "scatter", axis=1), "a partial sum, which scatter would leave unsummed"),
    (
        row,
        lambda s: s["down"].sync("fwd_post", "reduce_scatter", axis=-1),
        "split along its last dim, its bias is not",
        "axis=1",
    ),
    (vocabulary, lambda s: s["words"].sync("fwd_post", "all_gather", axis=1), "a partial sum, which all_gather"),
    # a whole output
    (None, lambda s: s["up"].sync("fwd_post", "all_reduce"), "all_reduce would add 2 equal outputs", "shard it first"),
    (None, lambda s: s["up"].sync("fwd_post", "reduce_scatter", axis=1), "reduce_scatter would add 2 equal outputs"),
    # the backward
    (row, lambda s: s["down"].sync("bwd_post", "all_reduce"), "input of a row-parallel module is split", "before it"),
    (
        column,
        lambda s: s["up"].sync("bwd_post", "all_gather", axis=1),
        "bwd_post all_gather is not needed",
        "reduce-scatters",
    ),
    (column, lambda s: s["up"].sync("bwd_post", "scatter", axis=1), "bwd_post scatter is not needed"),
    # twice
    (
        reduced,
        lambda s: s["down"].sync("fwd_post", "all_reduce"),
        "it has this sync already: sync(mode='fwd_post', op='all_reduce')",
    ),
    (gather_first, lambda s: s["up"].sync("fwd_pre", "all_gather", axis=-1), "it has this sync already"),
    (
        gather_first,
        lambda s: s["up"].sync("bwd_post", "all_reduce"),
        "sums the gradients already",
        "leave out bwd_post",
    ),
]


@pytest.mark.parametrize(("setup", "call", "message"), [(setup, call, text) for setup, call, *text in REFUSALS])
def test_sync_that_does_not_fit_is_refused(setup, call, message):
    sch = create_schedule(models.Toy(), Mesh(tp=2, rank=1))
    if setup:
        setup(sch)
    assert_refused(sch, call, *message)


def test_the_other_order_of_a_double_gradient_sum_is_refused_too():
    sch = create_schedule(models.Toy(), Mesh(tp=2))
    column(sch)
    sch["up"].sync("bwd_post", "all_reduce")
    assert_refused(sch, lambda s: s["up"].sync("fwd_pre", "all_gather", axis=1), "sums the gradients already")
