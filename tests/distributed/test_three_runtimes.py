"""One schedule on DeepSpeed, Megatron-Core and plain PyTorch: the same losses as the untouched model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_training as megatron
import models
from partbook.dialects import deepspeed, pytorch
from ranks import on_ranks

LR, STEPS = 0.5, 3
Steps = list[list[dict[str, Tensor]]]


def on_one_process(model: nn.Module, steps: Steps) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for batches in steps:
        loss = torch.stack([model(**batch).loss for batch in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_deepspeed(model: nn.Module, steps: Steps, tp: int, pp: int, options: dict[str, Any]) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, schedule="gpt2", schedule_args=options, tp=tp, pp=pp, config=config)
    losses = []
    for batches in steps:
        if pp > 1:
            losses.append(float(engine.train_batch(data_iter=iter(batches))))
            continue
        total = []
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total.append(loss.item())
        losses.append(sum(total) / len(total))
    return losses


def on_pytorch(model: nn.Module, steps: Steps, tp: int, pp: int, options: dict[str, Any]) -> list[float]:
    more = {"micro_batches": 4} if pp > 1 else {}
    trained, _ = pytorch.initialize(model, "gpt2", options, tp=tp, pp=pp, **more)
    if pp == 1:
        return on_one_process(trained, steps)
    optimizer, losses = torch.optim.SGD(trained.parameters(), lr=LR), []
    for batches in steps:
        losses.append(trained.step(batches).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_megatron(model: nn.Module, steps: Steps, tp: int, pp: int, options: dict[str, Any]) -> list[float]:
    megatron.start(tp, pp)
    sgd = {"optimizer": "sgd", "lr": LR, "sgd_momentum": 0.0, "clip_grad": 0.0}
    training = megatron.train("gpt2", model, options=options, optimizer=sgd)
    return [training.step(batches)[0].item() for batches in steps]


@pytest.mark.parametrize(
    ("tp", "pp", "options"), [(2, 1, {}), (2, 1, {"sequence_parallel": True}), (1, 2, {"checkpoint_ratio": 1.0})]
)
@on_ranks(2)
def test_one_schedule_gives_the_same_losses_on_three_runtimes(
    rank: int, tp: int, pp: int, options: dict[str, Any]
) -> None:
    steps = [[part for [part] in megatron.batches_of(step, padded=True)] for step in range(STEPS)]
    model = models.gpt2(layers=2).train()
    wanted = on_one_process(copy.deepcopy(model), steps)
    assert len({round(loss, 3) for loss in wanted}) == STEPS
    for runtime in (on_pytorch, on_deepspeed, on_megatron):
        losses = runtime(copy.deepcopy(model), steps, tp, pp, options)
        assert losses == pytest.approx(wanted, rel=1e-5), runtime.__name__
