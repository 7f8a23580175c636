"""An unedited script whose model is cut into stages by the launcher's flags, against the same model in one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GPT2LMHeadModel

from launch import free_port, launch

SCRIPT = Path(__file__).parent / "scripts" / "pipeline.py"


def partbook() -> tuple[object, ...]:
    """Each launch on a port of its own: another job of the machine may have the default one."""
    command = ("-m", "partbook.launchers.deepspeed", "--num_gpus", 2, "--master_port", free_port())
    return (*command, "--schedule", "gpt2", "--pp", 2)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_alone(script: ModuleType) -> tuple[torch.nn.Module, list[float]]:
    model, data, losses = script.build().train(), script.batches(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(script.STEPS):
        parts = [model(**next(data)).loss for _ in range(script.ACCUMULATION)]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_unedited_script_trains_in_stages_as_in_one_process(script: ModuleType, tmp_path: Path) -> None:
    """Lengths differ from batch to batch; the export of all stages is the model that one process trains."""
    launch(
        *partbook(), "--cuts", "transformer.h.0", "--export", tmp_path / "model", SCRIPT, "--out", tmp_path / "out",
        cwd=tmp_path,
    )  # fmt: skip
    model, losses = train_alone(script)
    for rank in range(2):
        found = json.loads((tmp_path / "out" / f"{rank}.json").read_text())
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert losses[-1] < losses[0] - 1e-2
    exported = GPT2LMHeadModel.from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=2e-4)


def test_plain_loop_is_told_what_to_call(tmp_path: Path) -> None:
    output = launch(*partbook(), SCRIPT, "--out", tmp_path, "--loop", "plain", cwd=tmp_path, code=1).output
    assert "engine(...) cannot run a model that is cut into pipeline stages" in output, output
    assert "engine.train_batch(data_iter=iterator)" in output, output


def test_rank_that_dies_in_a_step_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    finished = launch(*partbook(), SCRIPT, "--out", tmp_path, "--loop", "dies", cwd=tmp_path, timeout=120, code=1)
    assert 'raise RuntimeError("this rank has had enough")' in finished.output
    # a rank that waits for its peer would wait for ever
    assert finished.time - float((tmp_path / "died").read_text()) < 60
