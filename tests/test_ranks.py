"""What a multi-process test promises: every rank runs, and a fault on one of them is seen and named."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks, run_on_ranks


def failure(function, *args, world_size=2, timeout=60.0):
    """The report of a run that must fail."""
    with pytest.raises(pytest.fail.Exception) as caught:
        run_on_ranks(world_size, function, *args, timeout=timeout)
    return str(caught.value)


@on_ranks(2)
def test_ranks_form_one_world(rank):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 2, "gloo")
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "2"]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("word", ["left", "right"])
@on_ranks(2)
def test_parameters_and_fixtures_reach_every_rank(rank, tmp_path, word):
    (tmp_path / f"{word}-{rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{word}-0", f"{word}-1"]


@on_ranks(1)
def test_template_has_one_thread(rank):
    """A fork keeps only the thread that forks: a pool in the template would be lost, or its lock held for ever."""
    assert len(os.listdir(f"/proc/{os.getppid()}/task")) == 1


def gradient(rank, scale):
    weight = torch.full((2, 2), scale, requires_grad=True)
    (weight * (rank + 1)).sum().backward()
    return weight.grad


def test_values_come_back_in_the_order_of_the_ranks():
    ones = torch.ones(2, 2)
    first, second = run_on_ranks(2, gradient, 5.0)
    torch.testing.assert_close(first, ones)
    torch.testing.assert_close(second, 2 * ones)


def draw(rank):
    return rank, torch.rand(1).item(), random.random(), os.getpid()


def test_every_run_has_fresh_processes_and_the_same_seed():
    runs = run_on_ranks(2, draw) + run_on_ranks(2, draw)
    assert len({(torch_draw, python_draw) for _, torch_draw, python_draw, _ in runs}) == 1
    assert len({pid for *_, pid in runs}) == 4


def fail_on_rank_1(rank):
    print(f"rank {rank} is here")
    if rank == 1:
        time.sleep(0.3)
        assert rank + 1 == 1
    dist.barrier()


def test_first_failing_rank_is_reported_first():
    report = failure(fail_on_rank_1, world_size=4)
    assert report.startswith("rank 1 of 4 raised AssertionError: assert (1 + 1) == 1\n")
    first, *others = [part for part in report.split("----- rank ") if "raised" in part.partition("\n")[0]][1:]
    assert first.startswith("1 raised")
    assert "assert rank + 1 == 1" in first
    assert "one_rank.py" not in first
    assert all("Connection closed by peer" in other for other in others)
    assert "----- rank 3 printed\nrank 3 is here" in report


def hang_on_rank_0(rank):
    if rank == 0:
        time.sleep(600)
    raise ValueError("the other rank sleeps on")


def test_failure_does_not_wait_for_other_ranks():
    start = time.monotonic()
    report = failure(hang_on_rank_0)
    assert time.monotonic() - start < 20
    assert report.startswith("rank 1 of 2 raised ValueError: the other rank sleeps on")
    assert "----- rank 0 was still running" in report
    assert "in hang_on_rank_0" in report


def leave_a_barrier_out(rank, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def test_time_out_shows_the_stack_of_every_rank(tmp_path):
    report = failure(leave_a_barrier_out, tmp_path, timeout=3)
    _, *ranks = report.split("----- rank ")
    assert [rank.partition("\n")[0] for rank in ranks] == [f"{n} was still running (timeout=3 s)" for n in (0, 1)]
    assert all("in leave_a_barrier_out" in rank for rank in ranks)
    assert "in barrier" in ranks[0]
    assert_gone(tmp_path)


def assert_gone(folder: Path):
    """No rank that left its process id in ``folder`` is alive, or a zombie."""
    for path in folder.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_interrupt_ends_the_ranks(tmp_path):
    # A worker of pytest-xdist ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_when_ranks_run():
        while sum(path.read_text() != "" for path in tmp_path.iterdir()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_ranks_run, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(2, leave_a_barrier_out, tmp_path, timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_gone(tmp_path)


def die(rank, how):
    print("last words")
    if rank == 0:
        how()
    dist.barrier()


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_3():
    os._exit(3)


def exit_with_0():
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (kill_this_process, "rank 0 of 2 died by SIGKILL"),
        (exit_with_3, "rank 0 of 2 died with exit code 3"),
        (exit_with_0, "rank 0 of 2 died with exit code 0"),
        (sys.exit, "rank 0 of 2 raised SystemExit"),
    ],
)
def test_dead_rank_is_reported(how, message):
    report = failure(die, how)
    assert report.startswith(message)
    assert "----- rank 0 printed\nlast words" in report


def skip_on_rank_1(rank):
    if rank == 1:
        pytest.skip("rank 1 has no such thing")
    dist.barrier()


def test_skip_is_carried_to_pytest():
    with pytest.raises(pytest.skip.Exception, match="rank 1 has no such thing"):
        run_on_ranks(2, skip_on_rank_1)


def test_argument_that_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"draw: cannot send .*<lambda>"):
        run_on_ranks(2, draw, lambda: 0)


def return_lambda(rank):
    return lambda: rank


def test_value_that_cannot_come_back_is_a_failure():
    assert "pickle" in failure(return_lambda).partition("\n")[0]


@on_ranks(2)
def test_deepspeed_trains_a_gpt2_with_zero_1(rank):
    deepspeed = pytest.importorskip("deepspeed")
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.arange(8).view(1, 8) + rank
    before = engine(ids, labels=ids).loss
    engine.backward(before)
    engine.step()
    assert engine(ids, labels=ids).loss < before
