"""What ordinary scripts do around a pipeline: loaders, groups of parameters, schedulers, seeds."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import models
from deepspeed_pipelines import assert_weights, batches, config, dense_steps, nothing, start
from partbook.dialects.deepspeed import initialize
from partbook.dialects.deepspeed.pipeline import EndOfData
from ranks import on_ranks


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks(4)
def test_seeds_of_a_script_and_of_stages(rank: int) -> None:
    """Every rank seeds alike and shuffles alike, with dropout on; no two stages or replicas drop the same."""
    model = models.gpt2(layers=2, dropout=0.5)
    torch.manual_seed(3)
    engine = start(model, 2, cuts="transformer.h.0")
    dropped: list[list[bool]] = []
    for name, module in engine.module.named_modules():
        if name.endswith("mlp.dropout"):
            module.register_forward_hook(lambda _, __, output: dropped.append((output == 0).flatten().tolist()))
    data = models.batch(size=16, length=10)
    samples = [{key: value[i] for key, value in data.items()} for i in range(16)]
    seen = []
    for _ in range(2):
        loader = iter(DataLoader(samples, batch_size=2, shuffle=True))
        for _ in range(2):
            seen.append(engine.train_batch(data_iter=loader).item())
    assert len(set(seen)) == 4
    assert len(set(everywhere(torch.rand(1).item()))) == 1
    masks = everywhere(dropped)
    assert [len(one) for one in masks] == [8] * 4
    for one, other in itertools.combinations([mask for each in masks for mask in each], 2):
        assert one != other


@on_ranks(4)
def test_an_iterator_of_one_replica_ends(rank: int) -> None:
    """On the ranks of the other one too, and training goes on."""
    engine = start(models.gpt2(layers=2), 2)
    with pytest.raises(EndOfData, match="ended after 1 of the 2 micro-batches"):
        engine.train_batch(data_iter=iter(batches(1 if engine.scheduled.mesh.dp_rank else 2)))
    assert engine.train_batch(data_iter=iter(batches(2))).item() > 0


@on_ranks(2)
def test_loaders_and_datasets(rank: int) -> None:
    model = models.gpt2(layers=2)
    parts = [models.batch(size=1, length=10, seed=i) for i in range(8)]
    samples = [{name: value[0] for name, value in part.items()} for part in parts]
    engine, _, loader, _ = initialize(
        model=copy.deepcopy(model), pp=2, schedule=nothing, config=config(), training_data=samples
    )
    with pytest.raises(TypeError, match=r"data_iter is a .*Loader, no iterator: each step would take its first"):
        engine.train_batch(data_iter=DataLoader(samples, batch_size=2))
    assert loader is not None
    # DeepSpeed shuffles by a seed of its own.
    given: list[dict[str, Tensor]] = []
    engine.set_batch_fn(lambda batch: given.append(batch) or batch)
    losses = [engine.train_batch().item() for _ in range(2)]
    assert len(given) == 4
    torch.testing.assert_close(losses, dense_steps(model, [given[:2], given[2:]]), rtol=1e-5, atol=0)
    assert_weights(engine, model)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The head, which only the last stage has, and the rest."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name.startswith("lm_head")], "lr": 0.1},
        {"params": [p for name, p in named.items() if not name.startswith("lm_head")], "lr": 0.4},
    ]


def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "optimizer"}


@on_ranks(2)
def test_groups_and_a_scheduler_of_the_script(rank: int) -> None:
    """Each group keeps its learning rate where other ranks have groups that this one has not."""
    dense = models.gpt2(layers=2, tie_word_embeddings=False)
    model = copy.deepcopy(dense)

    def prepared(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(groups_of(model))
        halved = lambda step: 0.5**step  # noqa: E731
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [halved, lambda step: 1 / (1 + step)])

    optimizer, scheduler = prepared(model)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "pp": 2, "schedule": nothing}
    with pytest.raises(ValueError, match=r"stage 0 has no parameter of group 0 of the optimizer.* under ZeRO"):
        initialize(**given, config=without_optimizer(config(2, 1)))
    engine, *_ = initialize(**given, config=without_optimizer(config()))
    wanted, schedule = prepared(dense)
    for step in range(3):
        data = batches(2, 2 * step)
        loss = torch.stack([dense(**batch).loss for batch in data]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        wanted.step()
        schedule.step()
        wanted.zero_grad()
        found = engine.train_batch(data_iter=iter(data))
        torch.testing.assert_close(found.item(), loss.item(), rtol=1e-5, atol=0)
    assert_weights(engine, dense)


@on_ranks(2)
def test_frozen_parameters(rank: int) -> None:
    """They may be any but all of a stage, which is refused on every rank."""
    dense = models.gpt2(layers=2)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("h.0.mlp" in name or "h.1.attn" in name)
    engine = start(dense, 2, cuts="transformer.h.0")
    dense_losses = dense_steps(dense, [batches(2)])
    torch.testing.assert_close([engine.train_batch(data_iter=iter(batches(2))).item()], dense_losses, rtol=1e-5, atol=0)
    assert_weights(engine, dense)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("h.1." in name)
    with pytest.raises(
        ValueError, match=r"stage 0 has no parameter that is trained(.|\n)*move the cuts.*transformer.h.0"
    ):
        start(dense, 2, cuts="transformer.h.0")


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_tied_weight_that_one_owner_does_not_use(rank: int, more: dict[str, Any]) -> None:
    """Embeddings that the script has looked up: only the head's gradient is the weight's."""
    dense = models.gpt2(layers=2)
    torch.manual_seed(1)
    hidden = dense.config.n_embd
    data = [{"inputs_embeds": torch.randn(2, 10, hidden), "labels": batch["labels"]} for batch in batches(2, length=10)]
    engine = start(dense, 2, stage=1, config={**config(2, 1), **more})
    loss = engine.train_batch(data_iter=iter(data)).item()
    limit = 1e-2 if more else 1e-5
    torch.testing.assert_close(loss, dense_steps(dense, [data])[0], rtol=limit, atol=0)
    if not more:
        assert_weights(engine, dense)


@on_ranks(2)
def test_numbers_of_items(rank: int) -> None:
    """A number in each batch is no reason to trace anew."""
    dense = models.gpt2(layers=2)
    engine = start(dense, 2)
    for step in range(3):
        data = [{**batch, "num_items_in_batch": 20 + step + i} for i, batch in enumerate(batches(2, 2 * step))]
        found = engine.train_batch(data_iter=iter(data)).item()
        torch.testing.assert_close(found, dense_steps(dense, [data])[0], rtol=1e-5, atol=0)
    assert len(engine.scheduled.pipeline.wirings) <= 2


@on_ranks(2)
def test_measured_cuts_are_those_of_the_first_rank(rank: int) -> None:
    engine = start(models.gpt2(layers=4), 2, cuts="auto:time")
    assert len(set(everywhere(engine.scheduled.pipeline.cuts))) == 1
    assert engine.train_batch(data_iter=iter(batches(2))).item() > 0
