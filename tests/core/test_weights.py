"""How parameters are made of others: any rows of the result are the rows of the whole, and the way back is exact."""

import itertools
import random

import pytest
import torch

from partbook.core import cat, transpose
from partbook.core.weights import Source


def random_expression(seed):
    """An expression up to three deep over fresh sources, the tensors, and the whole computed by hand."""
    draw, tensors = random.Random(seed), {}

    def make(rows, columns, depth):
        if depth == 0 or draw.random() < 0.2:
            name = f"p{len(tensors)}"
            tensors[name] = torch.randn(rows, columns)
            return Source(name), tensors[name]
        if draw.random() < 0.4:
            part, whole = make(columns, rows, depth - 1)
            return transpose(part), whole.t()
        dim = draw.randint(0, 1)
        size = rows if dim == 0 else columns
        cuts = sorted(draw.sample(range(1, size), draw.randint(0, min(2, size - 1))))
        sizes = [stop - start for start, stop in itertools.pairwise([0, *cuts, size])]
        parts = [make(*((size, columns) if dim == 0 else (rows, size)), depth - 1) for size in sizes]
        return cat([part for part, _ in parts], dim), torch.cat([whole for _, whole in parts], dim)

    expression, whole = make(draw.randint(1, 8), draw.randint(1, 8), 3)
    return expression, tensors, whole


@pytest.mark.parametrize("seed", range(60))
def test_any_rows_are_those_of_the_whole_and_the_way_back_is_exact(seed):
    torch.manual_seed(seed)
    expression, tensors, whole = random_expression(seed)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    reads = []

    def reader(name, axis, start, stop):
        reads.append((stop - start) * tensors[name].numel() // tensors[name].shape[axis])
        return tensors[name].narrow(axis, start, stop - start)

    assert expression.shape(shapes) == tuple(whole.shape)
    assert sorted(expression.names()) == sorted(tensors)
    for axis in (0, 1):
        for start in range(whole.shape[axis] + 1):
            for stop in range(start, whole.shape[axis] + 1):
                reads.clear()
                rows = expression.read(reader, shapes, axis, start, stop)
                assert torch.equal(rows, whole.narrow(axis, start, stop - start))
                # and no more was read than that
                assert sum(reads) == rows.numel()
    back = dict(expression.invert(whole, shapes))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_an_expression_of_expressions_is_one_of_the_originals():
    fused = cat(["q", transpose("k")]).substitute({"q": Source("a.q"), "k": transpose(Source("a.k"))})
    assert fused == cat(["a.q", transpose(transpose("a.k"))])
    assert list(fused.names()) == ["a.q", "a.k"]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (cat(["a", "v"]), "cannot concatenate shapes [(2, 3), (4,)] along dim 0"),
        (cat(["a", "b"]), "cannot concatenate shapes [(2, 3), (2, 5)] along dim 0"),
        (transpose("v"), "cannot transpose shape (4,): it is no matrix"),
    ],
)
def test_shapes_that_clash_are_named(expression, message):
    with pytest.raises(ValueError) as caught:
        expression.shape({"a": (2, 3), "b": (2, 5), "v": (4,)})
    assert message in str(caught.value)
