"""What each rank computes on its slice: the ranks' parts, added here by hand, are the dense module's output."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from partbook.core import Mesh, create_schedule
from partbook.core.execution import plan_of


def parts(make, axis, tp, x, **arguments):
    """The output of the kernel of every rank."""
    found = []
    for rank in range(tp):
        sch = create_schedule(nn.Sequential(make()), Mesh(tp=tp, rank=rank))
        module = sch["0"].shard("weight", axis=axis, **arguments).module
        found.append(plan_of(module).kernel(module, x[rank] if isinstance(x, tuple | list) else x))
    return found


@pytest.mark.parametrize(("make", "axis"), [(lambda: nn.Linear(8, 6).double(), 1), (lambda: Conv1D(6, 8).double(), 0)])
def test_row_parallel_parts_and_the_bias_once_make_the_whole(make, axis):
    def seeded():
        torch.manual_seed(0)
        module = make()
        nn.init.normal_(module.bias)
        return module

    x, dense = torch.randn(3, 8, dtype=torch.float64), seeded()
    found = parts(seeded, axis, 2, x.chunk(2, dim=-1))
    torch.testing.assert_close(sum(found) + dense.bias, dense(x), rtol=1e-12, atol=1e-12)
    # this is what a bias on every rank would be
    assert not torch.allclose(sum(found) + 2 * dense.bias, dense(x))
    assert plan_of_row(seeded, axis).deferred_bias


def plan_of_row(make, axis):
    sch = create_schedule(nn.Sequential(make()), Mesh(tp=2))
    return plan_of(sch["0"].shard("weight", axis=axis).module)


@pytest.mark.parametrize(("words", "tp"), [(10, 2), (11, 2), (9, 4), (9, 8)])
@pytest.mark.parametrize("padding_idx", [None, 0, 4, 8])
def test_vocabulary_slices_add_up_to_the_dense_look_up_and_its_gradient(words, tp, padding_idx):
    """Also on ranks that hold nothing but padding; ids at the edges of every slice."""

    def seeded():
        torch.manual_seed(0)
        embedding = nn.Embedding(words, 3, padding_idx=padding_idx).double()
        nn.init.normal_(embedding.weight)
        return embedding

    ids, dense = torch.arange(words).repeat(2, 1), seeded()
    found = sum(parts(seeded, 0, tp, ids, pad=True))
    assert torch.equal(found, dense(ids))
    weight = torch.randn(found.shape, dtype=torch.float64)
    (dense(ids) * weight).sum().backward()
    gradients = []
    for rank in range(tp):
        sch = create_schedule(nn.Sequential(seeded()), Mesh(tp=tp, rank=rank))
        module = sch["0"].shard("weight", axis=0, pad=True).module
        (plan_of(module).kernel(module, ids) * weight).sum().backward()
        gradients.append(module.weight.grad)
    assert torch.equal(torch.cat(gradients)[:words], dense.weight.grad)


@pytest.mark.parametrize("wrong", [-1, 9, 15])
def test_id_outside_the_vocabulary_is_an_error_and_not_zeros(wrong):
    with pytest.raises(RuntimeError, match="a token id lies outside the vocabulary of 9"):
        parts(lambda: nn.Embedding(9, 3), 0, 2, torch.tensor([0, wrong]), pad=True)
