"""Small models in DeepSpeed's PipelineEngine, and the same steps of the untouched model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import models
from partbook.dialects.deepspeed import consolidate, initialize

SGD = {"type": "SGD", "params": {"lr": 0.5}}


def nothing(sch: Any) -> None:
    """A schedule without steps."""


def config(accumulation: int = 2, stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000},
        "zero_allow_untested_optimizer": True,
        "optimizer": copy.deepcopy(SGD),
        **more,
    }


def start(model: nn.Module, pp: int, *, stage: int = 0, accumulation: int = 2, **options: Any) -> Any:
    given = {"schedule": nothing, "config": config(accumulation, stage), **options}
    return initialize(model=copy.deepcopy(model), pp=pp, **given)[0]


def batches(count: int, first: int = 0, **options: Any) -> list[dict[str, Tensor]]:
    """Each of another length, and all padded."""
    return [
        models.batch(**{"size": 2, "length": 10 + 2 * ((first + i) % 4), "seed": first + i, "padded": True, **options})
        for i in range(count)
    ]


def dense_steps(model: nn.Module, steps: list[list[dict[str, Tensor]]], lr: float = 0.5) -> list[float]:
    """The losses of the untouched model, which is trained."""
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for step in steps:
        loss = torch.stack([model(**batch).loss for batch in step]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_weights(engine: Any, model: nn.Module, limit: float = 1e-5) -> None:
    state = consolidate(engine)
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(state[name], wanted, rtol=limit, atol=limit, msg=lambda text, n=name: f"{n}: {text}")
