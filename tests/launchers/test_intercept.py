"""What the launcher puts in the place of samplers and of accelerate's loaders and metrics: tp 2 x dp 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from partbook.core import find_schedule
from ranks import on_ranks


@contextmanager
def intercepted() -> Iterator[None]:
    from partbook.launchers.intercept import intercept

    # no test here makes an engine
    with pytest.raises(RuntimeError, match="made no engine"), intercept(find_schedule("gpt2"), {}, tp=2):
        yield


@on_ranks(4)
def test_sampler_divides_by_data_parallel_ranks_however_it_is_made(rank: int) -> None:
    data, dp_rank = list(range(8)), rank // 2
    with intercepted():
        for arguments in (
            {},
            {"num_replicas": 4},
            {"rank": rank},
            {"num_replicas": 4, "rank": rank},
            # scripts that know about tp
            {"num_replicas": 2},
            {"num_replicas": 2, "rank": dp_rank},
        ):
            assert list(DistributedSampler(data, shuffle=False, **arguments)) == data[dp_rank::2], arguments
        assert list(DistributedSampler(data, 4, rank, False)) == data[dp_rank::2]
        # for something else than the ranks of this job
        assert list(DistributedSampler(data, num_replicas=8, rank=3, shuffle=False)) == [3]
    assert list(DistributedSampler(data, shuffle=False)) == data[rank::4]


@on_ranks(4)
def test_accelerate_gives_tp_groups_the_same_batches_and_counts_them_once(rank: int) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    dp_rank = rank // 2
    # as transformers' TrainingArguments do: accelerate alone takes a CPU for a world of one
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=True)
    with intercepted():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
        seen = [batch.tolist() for batch in accelerator.prepare_data_loader(DataLoader(torch.arange(8), batch_size=2))]
        assert seen == ([[0, 1], [4, 5]] if dp_rank == 0 else [[2, 3], [6, 7]])
        one = {"loss": torch.tensor([[10.0 * dp_rank, 1.0]]), "count": (torch.tensor(dp_rank),)}
        gathered = accelerator.gather_for_metrics(one)
        assert gathered["loss"].tolist() == [[0.0, 1.0], [10.0, 1.0]]
        assert gathered["count"][0].tolist() == [0, 1]
        assert accelerator.gather_for_metrics([f"text {dp_rank}"], use_gather_object=True) == ["text 0", "text 1"]
        assert accelerator.gather_for_metrics([f"text {dp_rank}"]) == ["text 0", "text 1"]
        # what is gathered for anything else is every rank's
        assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]
