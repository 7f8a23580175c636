"""DeepSpeed: an engine over a scheduled model trains as the untouched model in one process, ZeRO 0 to 3."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from partbook.dialects.deepspeed import consolidate, gradients, initialize
from ranks import on_ranks

SP = {"sequence_parallel": True}
FUSED = {"fuse_qkv": True}
FUSED_LLAMA = {"fuse_qkv": True, "fuse_gate_up": True}
# eps as in verify: with 1e-8, a gradient that is zero but for rounding (a key's bias) is divided by itself, and becomes
# +-lr. No two programs agree on those parameters to 1e-5; they do on all others.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}}
# Every step is clipped, so a wrong norm scales the whole update: with SGD it cannot hide behind Adam's division.
SGD = {"type": "SGD", "params": {"lr": 1.0}}


@dataclass(frozen=True)
class Case:
    family: str
    stage: int
    accumulation: int = 1
    built_with: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAMW)

    def __str__(self) -> str:
        given = [*self.built_with, *self.options, self.optimizer["type"]]
        return f"{self.family} zero {self.stage} accumulation {self.accumulation} {' '.join(given)}"

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.1,
            "zero_optimization": {
                "stage": self.stage,
                # small buckets, so that a reduction has several
                "reduce_bucket_size": 5000,
                # ZeRO-3 would keep parameters as small as these whole
                "stage3_param_persistence_threshold": 0,
            },
            "zero_allow_untested_optimizer": True,
            "optimizer": copy.deepcopy(self.optimizer),
            **more,
        }

    @property
    def schedule(self) -> str:
        return "gpt2" if self.family == "gpt2" else "llama"

    def build(self) -> nn.Module:
        return getattr(models, self.family)(**self.built_with)


BIASED = {"attention_bias": True, "mlp_bias": True}
CHECKPOINTED = {"checkpoint_ratio": 0.5}
ON_2 = [
    Case("gpt2", 0),
    Case("gpt2", 0, 4, {"tied": False}, SP, SGD),
    Case("gpt2", 1, 4, {}, {**SP, **FUSED}),
    Case("gpt2", 2, 1, {"tied": False}, CHECKPOINTED),
    Case("gpt2", 3, 4),
    Case("llama", 0, 1, {"kv_heads": 1}, {}, SGD),
    Case("llama", 0, 4, BIASED, {**SP, **FUSED_LLAMA, **CHECKPOINTED}),
    Case("llama", 1, 1, {"kv_heads": 1}),
    Case("llama", 2, 4, {"tied": True}, SP),
    Case("llama", 3, 1, {}, {**FUSED_LLAMA, **CHECKPOINTED}, SGD),
    Case("llama", 3, 4, {"kv_heads": 1, "tied": True}),
]
ON_4 = [
    Case("gpt2", 0, 1, {}, SP, SGD),
    Case("llama", 1, 4, BIASED),
    Case("llama", 2, 1, {"tied": True}, FUSED_LLAMA),
    Case("gpt2", 3, 4, {}, {**SP, **FUSED}),
]


def micro_batches(case: Case, step: int) -> list[list[dict[str, Tensor]]]:
    """The parts of each dp rank, for every micro-batch of one step; labels that do not count differ between them."""
    dp = dist.get_world_size() // 2
    seeds = range(step * case.accumulation, (step + 1) * case.accumulation)
    wholes = [models.batch(size=2 * dp, seed=seed) for seed in seeds]
    return [[{k: v[2 * i : 2 * i + 2] for k, v in whole.items()} for i in range(dp)] for whole in wholes]


def make(optimizer: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, optimizer["type"])(parameters, **optimizer["params"])


def train_dense(dense: nn.Module, batches: list[list[dict[str, Tensor]]]) -> list[list[Tensor]]:
    """The gradient of the mean over micro-batches and dp ranks; the loss of each."""
    losses = [[dense(**part).loss for part in parts] for parts in batches]
    (sum(loss for row in losses for loss in row) / sum(len(row) for row in losses)).backward()
    return losses


def close(found: Tensor, wanted: Tensor, what: str, limit: float = 1e-5) -> None:
    found, wanted = found.detach().float(), wanted.detach().float()
    assert found.shape == wanted.shape, what
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    assert error <= limit, f"{what} differs by {error:.1e}"


def check_training(case: Case, engine: Any, dense: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    dp_rank = dist.get_rank() // 2
    for step in range(steps):
        batches = micro_batches(case, step)
        for parts, losses in zip(batches, train_dense(dense, batches), strict=True):
            loss = engine(**parts[dp_rank]).loss
            close(loss, losses[dp_rank], f"loss of step {step}")
            engine.backward(loss)
            if parts is batches[-1] and step == 0:
                check_gradients(gradients(engine), dense)
            engine.step()
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        assert norm > 0.2, "the clipping must be active"
        if case.stage > 0:
            # DeepSpeed does not report a norm for fp32 without ZeRO
            close(torch.tensor(float(engine.get_global_grad_norm())), norm, "gradient norm")
        optimizer.step()
        optimizer.zero_grad()
    check_weights(consolidate(engine), dense)


def check_gradients(found: dict[str, Tensor], dense: nn.Module) -> None:
    wanted = {name: parameter.grad for name, parameter in dense.named_parameters()}
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        # a key's bias has no gradient but rounding
        if grad.abs().max() < 1e-6 * largest:
            assert found[name].abs().max() < 1e-6 * largest
        else:
            close(found[name], grad, f"gradient of {name}", 2e-5)


def check_weights(found: dict[str, Tensor], dense: nn.Module) -> None:
    wanted = dense.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        close(found[name], value, name)


def check(case: Case) -> None:
    dense = case.build()
    model = copy.deepcopy(dense)
    engine, *_ = initialize(
        model=model,
        model_parameters=model.parameters(),
        config=case.config(),
        schedule=case.schedule,
        schedule_args=case.options,
        tp=2,
    )
    check_training(case, engine, dense, make(case.optimizer, dense.parameters()))


@pytest.mark.parametrize("case", ON_2, ids=str)
@on_ranks(2)
def test_tp_2_equals_the_dense_model(rank, case):
    check(case)


@pytest.mark.parametrize("case", ON_4, ids=str)
@on_ranks(4)
def test_tp_2_dp_2_equals_the_dense_model(rank, case):
    check(case)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As scripts have it: no weight decay for biases and norms."""
    parameters = list(model.parameters())
    decayed = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
    return [decayed, {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 5e-3}]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, FUSED], ids=["plain", "fused"])
@on_ranks(2)
def test_the_users_optimizer_and_scheduler_stay_theirs(rank, stage, options):
    """Built before initialize, on the dense model's parameters; a fused parameter takes the place of its parts."""
    case = Case("llama", stage, 2, BIASED, options)
    dense = case.build()
    model = copy.deepcopy(dense)
    optimizers = [torch.optim.AdamW(groups(m), lr=1e-2, eps=1e-5) for m in (dense, model)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    config = case.config()
    del config["optimizer"]
    engine, *_ = initialize(
        model=model, optimizer=optimizers[1], lr_scheduler=schedulers[1], config=config, schedule="llama",
        schedule_args=options, tp=2,
    )  # fmt: skip
    held = [len(group["params"]) for group in optimizers[1].param_groups]
    if stage == 0:
        fused = 4 if options else 0
        assert held == [len(group["params"]) - fused for group in optimizers[0].param_groups]
    reference = Stepped(optimizers[0], schedulers[0])
    check_training(case, engine, dense, reference, steps=3)
    assert engine.get_lr() == [group["lr"] for group in optimizers[0].param_groups] == [1e-2 / 4, 5e-3 / 4]


class Stepped:
    """An optimizer whose scheduler steps with it, as an engine's does."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


@on_ranks(2)
def test_a_scheduler_in_the_config_works_unchanged(rank):
    case = Case("gpt2", 1)
    dense = case.build()
    model = copy.deepcopy(dense)
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    engine, _, _, scheduler = initialize(
        model=model,
        model_parameters=model.parameters(),
        config=case.config(scheduler={"type": "WarmupLR", "params": warmup}),
        schedule="gpt2",
        tp=2,
    )
    optimizer = make(ADAMW, dense.parameters())
    rates = [engine.get_lr()[0]]

    class Following:
        zero_grad = optimizer.zero_grad

        def step(self) -> None:
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.step()
            rates.append(engine.get_lr()[0])

    check_training(case, engine, dense, Following())
    assert len(set(rates)) > 3
    assert scheduler is engine.lr_scheduler


@on_ranks(2)
def test_parameters_that_become_one_must_be_in_one_group(rank):
    model = models.llama()
    projections = [p for name, p in model.named_parameters() if "k_proj" in name]
    others = [p for p in model.parameters() if not any(p is other for other in projections)]
    optimizer = torch.optim.AdamW([{"params": projections, "lr": 1e-4}, {"params": others}])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"k_proj.weight.*become one parameter.*are in different groups") as error:
        initialize(model=model, optimizer=optimizer, config=Case("llama", 1).config(), schedule="llama",
                   schedule_args=FUSED, tp=2)  # fmt: skip
    assert "do not fuse them" in str(error.value)
    assert_equal(model.state_dict(), before)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(projections), len(others)]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


class MasterWeights:
    """AdamW on float32 copies of a 16-bit model's weights, as engines keep them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [parameter.detach().float().clone() for parameter in model.parameters()]
        self.optimizer = make(ADAMW, self.masters)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 0.1)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_bf16_trains_as_a_bf16_model_does(rank, stage):
    """bf16 keeps 8 bits, so single values differ by 2^-8 and their sums by less; the rotary tables stay float32."""
    case = Case("llama", stage, 1, {}, SP)
    exact = case.build()
    dense, model = copy.deepcopy(exact), copy.deepcopy(exact)
    tables = {name: buffer.clone() for name, buffer in dense.named_buffers() if "inv_freq" in name}
    assert tables
    dense = dense.bfloat16()
    for name, table in tables.items():
        dense.get_submodule(name.rpartition(".")[0]).inv_freq = table
    engine, *_ = initialize(
        model=model, model_parameters=model.parameters(), config=case.config(bf16={"enabled": True}),
        schedule="llama", schedule_args=case.options, tp=2,
    )  # fmt: skip
    for name, table in tables.items():
        buffer = dict(engine.module.named_buffers())[name]
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, table)
        assert not torch.equal(table, table.bfloat16().float()), "this would not show a cast"
    reference = MasterWeights(dense)
    for step in range(5):
        [[part]] = micro_batches(case, step)
        wanted = dense(**part).loss
        wanted.backward()
        loss = engine(**part).loss
        close(loss, wanted, f"loss of step {step}", 3e-3)
        engine.backward(loss)
        if step == 0:
            found = gradients(engine)
            for name, parameter in dense.named_parameters():
                error = (found[name].float() - parameter.grad.float()).norm() / parameter.grad.float().norm()
                assert error < 3e-2, (name, error)
        engine.step()
        norm = torch.stack([p.grad.float().norm() for p in dense.parameters()]).norm()
        close(torch.tensor(float(engine.get_global_grad_norm())), norm, "gradient norm", 1e-2)
        reference.step()
    full, start = consolidate(engine), exact.state_dict()
    for name, value in dense.state_dict().items():
        assert full[name].dtype == torch.bfloat16
        moved = (value.float() - start[name].bfloat16().float()).norm()
        assert (full[name].float() - value.float()).norm() <= 0.1 * moved, name
