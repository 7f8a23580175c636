"""The systems that ``pipeline.py`` measures: one function each cuts the model and gives its step on some runtime."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import System, Trial
from systems import Job
from torch import Tensor, nn

LEARNING_RATE = 0.02


@dataclass(frozen=True, kw_only=True)
class PipelineJob(Job):
    """``micro_batches`` of ``batch`` sequences each make one step."""

    micro_batches: int
    pp: int = 2

    def batches(self) -> list[Tensor]:
        """The ids of each micro-batch: the same ones in every step."""
        random = torch.Generator().manual_seed(1)
        shape = (self.micro_batches, self.batch, self.sequence)
        return list(torch.randint(self.vocabulary, shape, generator=random))

    @functools.cached_property
    def vocabulary(self) -> int:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder).vocab_size

    def config(self) -> dict[str, Any]:
        """DeepSpeed's. Without clipping, which torch's pipelining does not have."""
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }


class Sent:
    """Counts the bytes that this rank sends to another one."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        untouched = dist.ProcessGroup.send

        def send(group: Any, tensors: list[Tensor], *args: Any) -> Any:
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.messages += len(tensors)
            return untouched(group, tensors, *args)

        dist.ProcessGroup.send = send


def _trial(module: nn.Module, step: Callable[[], Tensor], sent: Sent | None) -> Mapping[str, Trial]:
    """``extra`` of the trial: bytes and messages that this rank sends in one step."""

    def counted() -> Tensor:
        before = (sent.bytes, sent.messages) if sent else (0, 0)
        loss = step()
        if sent:
            trial.extra.update(bytes=sent.bytes - before[0], messages=sent.messages - before[1])
        return loss

    trial = Trial(module, counted, lambda: None)
    return {"step": trial}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def eager(job: PipelineJob) -> Mapping[str, Trial]:
    model = job.model()
    optimizer, batches = sgd(model.parameters()), job.batches()

    def step() -> Tensor:
        total = torch.zeros(())
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return _trial(model, step, None)


class _Embed(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class _Block(nn.Module):
    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        self.layer, self.rotary = model.model.layers[index], model.model.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions), position_ids=positions)


class _Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, logits.shape[-1]), shifted)


def deepspeed_by_hand(job: PipelineJob) -> Mapping[str, Trial]:
    """A PipelineModule as one writes it for a Llama: blocks evenly over the stages, only the hidden state crosses."""
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule

    _start_deepspeed()
    sent, model = Sent(), job.model()
    layers = [_Embed(model), *(_Block(model, i) for i in range(len(model.model.layers))), _Head(model)]
    module = PipelineModule(layers, num_stages=job.pp, loss_fn=_loss, partition_method="type:_Block")
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd(module.parameters()), config=job.config())
    data = itertools.cycle([(ids, ids) for ids in job.batches()])
    return _trial(engine.module, lambda: engine.train_batch(data_iter=data), sent)


def partbook_deepspeed(job: PipelineJob) -> Mapping[str, Trial]:
    return _partbook_deepspeed(job, "auto")


def partbook_deepspeed_even(job: PipelineJob) -> Mapping[str, Trial]:
    return _partbook_deepspeed(job, _even_cut(job))


def _partbook_deepspeed(job: PipelineJob, cuts: str) -> Mapping[str, Trial]:
    from partbook.dialects.deepspeed import initialize

    _start_deepspeed()
    sent, model = Sent(), job.model()
    engine, *_ = initialize(
        model=model, optimizer=sgd(model.parameters()), schedule=_nothing, pp=job.pp, cuts=cuts, config=job.config()
    )
    data = itertools.cycle([{"input_ids": ids, "labels": ids} for ids in job.batches()])
    return _trial(engine.module, lambda: engine.train_batch(data_iter=data), sent)


def torch_tracer(job: PipelineJob) -> Mapping[str, Trial]:
    """torch's ``pipeline()``: torch.export of the whole model, split before a block, 1F1B."""
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    sent, model, batches = Sent(), job.model(), job.batches()
    first = f"model.layers.{len(model.model.layers) // job.pp}"
    cut = pipeline(
        model,
        mb_args=(),
        mb_kwargs={"input_ids": batches[0], "use_cache": False},
        split_spec={first: SplitPoint.BEGINNING},
    )
    stage = cut.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.micro_batches, loss_fn=_loss)
    optimizer, ids = sgd(stage.submod.parameters()), torch.cat(batches)

    def step() -> Tensor:
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(input_ids=ids)
        else:
            schedule.step(target=ids, losses=losses)
        optimizer.step()
        return _shared(losses)

    return _trial(stage.submod, step, sent)


def partbook_torch(job: PipelineJob) -> Mapping[str, Trial]:
    return _partbook_torch(job, "auto")


def partbook_torch_even(job: PipelineJob) -> Mapping[str, Trial]:
    return _partbook_torch(job, _even_cut(job))


def _partbook_torch(job: PipelineJob, cuts: str) -> Mapping[str, Trial]:
    from partbook.dialects.pytorch import initialize

    sent, model = Sent(), job.model()
    trained, _ = initialize(model, _nothing, pp=job.pp, cuts=cuts, micro_batches=job.micro_batches)
    optimizer, ids = sgd(trained.parameters()), torch.cat(job.batches())

    def step() -> Tensor:
        loss = trained.step({"input_ids": ids, "labels": ids})
        optimizer.step()
        return loss

    return _trial(trained.module, step, sent)


def _nothing(sch: Any, options: Any = None) -> None:
    """A schedule without steps."""


def _even_cut(job: PipelineJob) -> str:
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(job.folder).num_hidden_layers
    return ",".join(f"model.layers.{layers * (i + 1) // job.pp - 1}" for i in range(job.pp - 1))


def _shared(losses: list[Tensor]) -> Tensor:
    """The mean loss, which the last stage has, on every rank."""
    mean = torch.stack([loss.detach() for loss in losses]).mean().float() if losses else torch.zeros(())
    dist.broadcast(mean, src=dist.get_world_size() - 1)
    return mean


def _start_deepspeed() -> None:
    import deepspeed

    # Only inference needs it, and it is compiled for most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


SYSTEMS = {
    system.name: system
    for system in [
        System("eager", 1, eager),
        System("deepspeed", 2, deepspeed_by_hand, peer=True),
        System("torch", 2, torch_tracer, peer=True),
        System("partbook-deepspeed", 2, partbook_deepspeed),
        System("partbook-deepspeed-even", 2, partbook_deepspeed_even),
        System("partbook-torch", 2, partbook_torch),
        System("partbook-torch-even", 2, partbook_torch_even),
    ]
}
