"""DeepSpeed: checkpoints resume bit by bit, and a running engine becomes a Hugging Face folder at any ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import models
from partbook.core import PartbookError
from partbook.dialects.deepspeed import consolidate, initialize, save_pretrained
from ranks import on_ranks, run_on_ranks

ALL = {"sequence_parallel": True, "fuse_qkv": True}


def start(family: str, stage: int, options: dict[str, Any], bf16: bool = False, **built_with: Any) -> Any:
    model = getattr(models, family)(**built_with)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.1,
        # ZeRO-3 would keep parameters as small as these whole
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        "bf16": {"enabled": bf16},
    }
    parameters = model.parameters()
    engine, *_ = initialize(
        model=model, model_parameters=parameters, config=config, schedule=family, schedule_args=options, tp=2
    )
    return engine


def train(engine: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = engine(**models.batch(seed=step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("family", "stage", "options", "bf16"),
    [("gpt2", 0, ALL, False), ("gpt2", 1, {}, False), ("llama", 1, ALL, True), ("gpt2", 3, ALL, True),
     ("llama", 3, {}, False)],
)  # fmt: skip
@on_ranks(2)
def test_a_checkpoint_resumes_bit_by_bit(rank, tmp_path, family, stage, options, bf16):
    engine = start(family, stage, options, bf16)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path, client_state={"seen": 8})
    wanted = train(engine, range(2, 5))
    weights = consolidate(engine)

    # other weights, and moments of its own
    other = start(family, stage, options, bf16, seed=7)
    train(other, range(5, 6))
    path, client_state = other.load_checkpoint(tmp_path)
    assert path is not None
    assert client_state["seen"] == 8
    assert torch.equal(torch.stack(train(other, range(2, 5))), torch.stack(wanted))
    for name, value in consolidate(other).items():
        assert torch.equal(value, weights[name]), name


def train_and_save(rank: int, folder: Path, family: str, stage: int, options: dict[str, Any], tied: bool) -> Tensor:
    engine = start(family, stage, options, tied=tied)
    train(engine, range(3))
    save_pretrained(engine, folder)
    for save in (engine.save_16bit_model, engine.save_fp16_model):
        with pytest.raises(PartbookError, match=r"this tp rank's slices.*\n.*save_pretrained"):
            save(str(folder / "refused"))
    with pytest.raises(PartbookError, match=r"this rank's slices.*\n.*save_pretrained"):
        engine.module.save_pretrained(folder / "refused")
    assert not (folder / "refused").exists()
    # the engine still trains
    train(engine, range(3, 4))
    save_pretrained(engine, folder, max_shard_size=20_000)
    with torch.no_grad():
        return engine.module.eval()(**inputs()).logits


def inputs() -> dict[str, Tensor]:
    return {"input_ids": models.batch(seed=9)["input_ids"]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("family", "options", "tied"), [("gpt2", ALL, True), ("llama", ALL, False), ("llama", {}, True)]
)
def test_a_running_engine_becomes_a_folder_that_plain_transformers_loads(tmp_path, family, stage, options, tied):
    on_rank_0, on_rank_1 = run_on_ranks(2, train_and_save, tmp_path, family, stage, options, tied)
    assert torch.equal(on_rank_0, on_rank_1)
    # written twice: nothing of the first, in one file, is left
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert not (tmp_path / "model.safetensors").exists()
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    dense = getattr(models, family)(tied=tied)
    wanted = {name: tuple(parameter.shape) for name, parameter in dense.named_parameters()}
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == wanted
    assert ("lm_head.weight" in saved) != tied

    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(dense)
    assert not any(found.values()), found
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied
    with torch.no_grad():
        logits, before = loaded.eval()(**inputs()).logits, dense.eval()(**inputs()).logits
    assert logits.shape == (4, 16, models.VOCABULARY)
    torch.testing.assert_close(logits, on_rank_0, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-2, "it was trained"
