"""``verify`` finds what is wrong with a schedule, says where it starts, and needs no launcher."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import models
from partbook.core import Mesh, Report, Schedule, VerificationError, verify
from partbook.core.collectives import pair, sum_over
from partbook.schedules.parallel import column, row, split_vocabulary
from ranks import on_ranks

TWO = Mesh(tp=2)


def mlps(sch: Schedule, *, enter: Any = "all_reduce", leave: Any = "all_reduce") -> None:
    """Only the feed-forwards of a GPT-2 split, each between the two syncs that it needs."""
    for block in sch.select("transformer.h.*"):
        if enter is not None:
            block["mlp"].sync("bwd_post", enter)
        column(block["mlp.c_fc"])
        block["mlp.c_proj"].shard("weight", axis=0).sync("fwd_post", leave)


def without_backward_sum(sch: Schedule) -> None:
    mlps(sch, enter=None)


def summed_twice(x: Tensor, group: ProcessGroup) -> Tensor:
    return sum_over(sum_over(x, group), group)


def with_backward_sum_twice(sch: Schedule) -> None:
    mlps(sch, enter=summed_twice)


def mean_over(x: Tensor, group: ProcessGroup) -> Tensor:
    return pair(x, lambda t: sum_over(t, group) / group.size(), lambda grad: grad)


def with_mean_of_outputs(sch: Schedule) -> None:
    mlps(sch, leave=mean_over)


def sum_with_backward_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return pair(x, lambda t: sum_over(t, group), lambda grad: sum_over(grad, group))


def with_sum_in_both_directions(sch: Schedule) -> None:
    """What ``torch.distributed.nn.all_reduce`` does: right outputs, gradients times the number of ranks."""
    mlps(sch, leave=sum_with_backward_sum)


def bias_on_every_rank(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum as if each rank had added a bias of its own before it."""
    bias = torch.linspace(0, 0.1, x.shape[-1], dtype=x.dtype)
    return pair(x, lambda t: sum_over(t + bias, group), lambda grad: grad)


def with_bias_added_twice(sch: Schedule) -> None:
    mlps(sch, leave=bias_on_every_rank)


def without_sums_of_norms(sch: Schedule) -> None:
    """Sequence parallelism whose norms keep the gradients of their own slices."""
    split_vocabulary(sch, "transformer.wte", "lm_head")
    for block in sch.select("transformer.h.*"):
        block["mlp"].sync("fwd_pre", "all_gather", axis=1)
        column(block["mlp.c_fc"])
        row(block["mlp.c_proj"], sequence_parallel=True)
        block["ln_2"].sync("fwd_pre", "scatter", axis=1)
        block["mlp"].sync("fwd_post", "all_gather", axis=1)


def with_sums_of_norms(sch: Schedule) -> None:
    without_sums_of_norms(sch)
    for block in sch.select("transformer.h.*"):
        for name in ("weight", "bias"):
            block["ln_2"].annotate(name, "partial_gradient", True)


def without_backward_sum_of_head(sch: Schedule) -> None:
    """Everything below the head sees a part of its gradient, a rank's columns of the vocabulary."""
    sch["transformer.wte"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch.shard_loss("lm_head")


def check(schedule: Any, **given: Any) -> Report:
    return verify(models.gpt2(), schedule, TWO, models.batch(), dtype=torch.float64, steps=2, **given)


@pytest.mark.parametrize("schedule", [mlps, with_sums_of_norms, "gpt2"])
@on_ranks(2)
def test_right_schedules_pass(rank, schedule):
    report = check(schedule).raise_if_failed()
    assert report.ok
    assert report.first_module is None
    assert str(report).startswith("ok on dp=1 tp=2: ")
    assert "EXCEEDS" not in str(report)


# schedule -> the first module, in the order of execution, and a comparison that is wrong; one that is right
WRONG = [
    (without_backward_sum, "transformer.h.1.ln_2 (the gradient of its output)", "gradient", "loss of step 0"),
    (with_backward_sum_twice, "transformer.h.1.ln_2 (the gradient of its output)", "gradient", "loss of step 0"),
    (with_sum_in_both_directions, "transformer.h.1.mlp.act (the gradient of its output)", "gradient", "loss of step 0"),
    (with_mean_of_outputs, "transformer.h.0.mlp.c_proj (its output)", "loss", None),
    (with_bias_added_twice, "transformer.h.0.mlp.c_proj (its output)", "loss", None),
    (without_sums_of_norms, "transformer.h.1.ln_2 (the gradient of its parameters)", "gradient", "loss of step 0"),
    (without_backward_sum_of_head, "transformer.ln_f (the gradient of its output)", "gradient", "loss of step 0"),
]


@pytest.mark.parametrize(("schedule", "where", "wrong", "right"), WRONG)
@on_ranks(2)
def test_wrong_schedules_are_found_and_placed(rank, schedule, where, wrong, right):
    report = check(schedule)
    assert not report.ok
    assert report.first_module == where
    assert any(difference.what == wrong and not difference.ok for difference in report.differences)
    fine = {f"{difference.what} {difference.name}" for difference in report.differences if difference.ok}
    assert right is None or right in fine
    with pytest.raises(VerificationError) as error:
        report.raise_if_failed()
    assert str(error.value).startswith("FAILED on dp=1 tp=2")
    assert f"first module that differs: {where}" in str(error.value)
    assert "EXCEEDS 1e-09" in str(error.value)


@on_ranks(4)
def test_a_batch_that_the_dp_ranks_cannot_share_equally_is_refused(rank):
    with pytest.raises(ValueError, match="dim 0 of input_ids is 3, which does not divide by dp=2"):
        verify(models.gpt2(), "gpt2", Mesh(tp=2, dp=2), models.batch(size=3))


def test_verify_starts_its_own_ranks_where_there_is_no_world():
    """From a function that makes the model, in each of them; the report comes back."""
    report = verify(models.llama, "llama", TWO, models.batch(), dtype=torch.float64, steps=1, timeout=120)
    assert report.ok, str(report)
    assert report.worst("loss").tolerance == 1e-9
    assert {difference.what for difference in report.differences} == {
        "loss", "gradient", "gradient norm", "parameter", "output"
    }  # fmt: skip


def test_what_cannot_be_sent_to_other_processes_is_refused_at_once():
    with pytest.raises(TypeError, match=r"cannot be sent to other processes(.|\n)*not lambdas"):
        verify(lambda: models.gpt2(), "gpt2", TWO, models.batch())
    with pytest.raises(TypeError, match=r"cannot be sent to other processes(.|\n)*not lambdas"):
        verify(models.gpt2, lambda sch: None, TWO, models.batch())
