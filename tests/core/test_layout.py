"""One parameter over the tp ranks: slices and whole determine each other, for every kind of split."""

import random

import pytest
import torch

from partbook.core import Layout


def random_layout(seed):
    """A layout of 1 to 3 dims, with segments, replicas or padding, and a full tensor of distinct numbers."""
    draw = random.Random(seed)
    replicas, slices = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4, 8])
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    axis = draw.randrange(len(shape))
    if draw.random() < 0.5:
        # a vocabulary: any size, padded to divide by all ranks
        segments, degree = (draw.randint(1, 40),), slices * replicas
        padding = -segments[0] % degree
    else:
        segments, degree, padding = (
            tuple(slices * draw.randint(1, 4) for _ in range(draw.randint(1, 4))),
            slices * replicas,
            0,
        )
    shape[axis] = sum(segments)
    layout = Layout(axis, tuple(shape), segments, degree, replicas, padding)
    return layout, torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("seed", range(150))
def test_slices_of_all_ranks_make_the_whole_exactly(seed):
    layout, full = random_layout(seed)
    parts = [layout.split(full, rank) for rank in range(layout.degree)]
    assert {tuple(part.shape) for part in parts} == {layout.local_shape()}
    assert torch.equal(layout.merge(parts), full)
    # every element of the whole is on exactly `replicas` ranks, and what is not of the whole is zero
    held = torch.cat([part.flatten() for part in parts])
    assert torch.equal(held[held != 0].sort().values, full.flatten().repeat_interleave(layout.replicas))


@pytest.mark.parametrize("seed", range(50))
def test_ranges_cover_every_segment_once_on_the_first_replicas(seed):
    layout, full = random_layout(seed)
    counting = [rank for rank in range(layout.degree) if layout.is_first_replica(rank)]
    assert len(counting) == layout.slices
    rows = [row for rank in counting for start, stop in layout.ranges(rank) for row in range(start, stop)]
    assert sorted(rows) == list(range(full.shape[layout.axis]))
    for rank in range(layout.degree):
        ranges = layout.ranges(rank)
        assert ranges == layout.ranges(rank // layout.replicas * layout.replicas)
        assert len(ranges) == len(layout.segments)
        pieces = [full.narrow(layout.axis, start, stop - start) for start, stop in ranges]
        assert torch.equal(layout.assemble(pieces), layout.split(full, rank))


@pytest.mark.parametrize("seed", range(30))
def test_other_tensors_are_split_and_merged_along_an_axis_of_their_own(seed):
    """Activations and gradients lie like the parameter, but in another dim."""
    layout, _ = random_layout(seed)
    x = torch.randn(2, 3, layout.shape[layout.axis])
    parts = [layout.split(x, rank, axis=-1) for rank in range(layout.degree)]
    assert {part.shape for part in parts} == {(2, 3, layout.local_size())}
    assert torch.equal(layout.merge(parts, axis=-1), x)


def test_segments_are_split_each_by_itself():
    layout = Layout(0, (8,), (4, 2, 2), 2)
    qkv = torch.tensor([1, 2, 3, 4, 10, 20, 100, 200])
    assert layout.split(qkv, 0).tolist() == [1, 2, 10, 100]
    assert layout.split(qkv, 1).tolist() == [3, 4, 20, 200]
    assert layout.ranges(1) == [(2, 4), (5, 6), (7, 8)]


def test_padding_is_zeros_at_the_end_and_never_in_the_whole():
    layout = Layout(0, (5,), (5,), 4, padding=3)
    words = torch.tensor([1.0, 2, 3, 4, 5])
    assert [layout.split(words, rank).tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert layout.ranges(3) == [(5, 5)]
    # what a rank wrote into its padding does not come back
    dirty = [layout.split(words, rank).where(layout.split(words, rank) != 0, torch.tensor(9.0)) for rank in range(4)]
    assert torch.equal(layout.merge(dirty), words)


def test_replicas_are_neighbours_and_count_once():
    layout = Layout(0, (4,), (4,), 4, replicas=2)
    heads = torch.tensor([1, 2, 3, 4])
    assert [layout.split(heads, rank).tolist() for rank in range(4)] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert [layout.is_first_replica(rank) for rank in range(4)] == [True, False, True, False]
    assert torch.equal(layout.merge([layout.split(heads, rank) for rank in range(4)]), heads)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(0, (8, 4), (8,), 2), "dim 0 of [8, 4] over 2"),
        (Layout(1, (4, 6), (2, 4), 2), "dim 1 of [4, 6] over 2, segments [2, 4]"),
        (Layout(0, (4,), (4,), 4, replicas=2), "dim 0 of [4] over 4, 2 replicas"),
        (Layout(0, (99, 2), (99,), 2, padding=1), "dim 0 of [99, 2] over 2, 1 padded"),
    ],
)
def test_layout_prints_what_is_split(layout, text):
    assert str(layout) == text
