"""``fork_rng``: a random stream of its own on every tp rank, and the default one as if nothing had happened."""

import pytest
import torch

import models
from partbook.core import Mesh, create_schedule, rng
from replays import assert_refused, assert_replays


@pytest.mark.parametrize("shared", [(), ("c_attn", "resid_dropout")])
def test_forked_and_shared_modules_are_recorded_printed_and_replayed(shared):
    sch = create_schedule(models.gpt2(), Mesh(tp=2))
    attn = sch["transformer.h.0.attn"].fork_rng(shared=shared)
    assert str(attn).count("forked rng") == 1
    assert str(attn).count("shared rng") == len(shared)
    assert_replays(sch, models.gpt2())


def test_nothing_changes_on_a_single_rank():
    model, reference, ids = models.Toy(), models.Toy(), torch.tensor([[1, 2, 3]])
    sch = create_schedule(model)
    sch["drop"].fork_rng()
    torch.manual_seed(5)
    expected = reference(ids)
    torch.manual_seed(5)
    assert torch.equal(model(ids), expected)
    assert_replays(sch, models.Toy())


def streams(tp_rank):
    torch.manual_seed(11)
    before = torch.rand(3)
    with rng.forked(tp_rank):
        first = torch.rand(3)
        with rng.shared():
            inner = torch.rand(3)
        second = torch.rand(3)
    return before, first, inner, second, torch.rand(3)


def test_forked_stream_differs_between_ranks_and_leaves_the_shared_one_equal():
    """The two ranks' draws, made one after the other in this process."""
    one, other = streams(0), streams(1)
    equal = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert equal == [True, False, True, False, True]
    # no two draws of a rank are the same numbers
    assert len({tuple(draw.tolist()) for draw in one}) == 5


def test_restoring_the_default_stream_replays_a_forked_region():
    """What recomputation relies on: nothing is kept between two regions."""
    torch.manual_seed(2)
    state = torch.get_rng_state()
    with rng.forked(1):
        first = torch.rand(4)
    after = torch.rand(4)
    torch.set_rng_state(state)
    with rng.forked(1):
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.rand(4), after)


def test_an_error_inside_leaves_the_default_stream():
    torch.manual_seed(2)
    with rng.forked(0):
        pass
    expected = torch.rand(2)
    torch.manual_seed(2)
    with pytest.raises(KeyError), rng.forked(0):
        raise KeyError
    assert torch.equal(torch.rand(2), expected)
    with rng.shared():
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s["attn"].fork_rng(shared=("resid_droput",)),
            ("it has no module 'resid_droput'", "'resid_dropout'"),
        ),
        (lambda s: s["mlp"].fork_rng(), ("it has a forked random stream already",)),
        (lambda s: s["mlp.dropout"].fork_rng(), ("it has a shared random stream already",)),
        (lambda s: s.fork_rng(shared=("mlp.dropout",)), ("mlp.dropout has a shared random stream already",)),
    ],
)
def test_unknown_and_double_streams_are_refused(call, message):
    sch = create_schedule(models.gpt2(), Mesh(tp=2))["transformer.h.0"]
    sch["mlp"].fork_rng(shared=("dropout",))
    assert_refused(sch, call, *message)


def test_streams_of_stages_differ_and_the_default_one_draws_once():
    """Whatever a stage draws, the script draws the same after it; forked and shared modules work inside."""
    drawn = []
    for number in (0, 1, 1):
        torch.manual_seed(11)
        with rng.of_stage(number):
            own = [torch.rand(3)]
            with rng.forked(0), rng.shared():
                own.append(torch.rand(3))
            torch.rand(number)
        drawn.append((torch.stack(own), torch.rand(3)))
    (first, after), (second, after_second), (again, _) = drawn
    assert not torch.isclose(first, second).any()
    assert torch.equal(second, again)
    assert torch.equal(after, after_second)
    with rng.of_stage(0):
        assert not torch.isclose(torch.rand(3), first[0]).any()
