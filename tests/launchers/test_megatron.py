"""The Megatron launcher: torchrun, the schedule's flags for the script, and megatron-core on the CPU when asked for."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import models
from launch import launch

SCRIPT = Path(__file__).parent / "scripts" / "megatron_loop.py"
LAUNCHER = ("-W", "ignore", "-m", "partbook.launchers.megatron", "--nproc-per-node", 2, "--standalone")


def losses_of_one_process(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        batches = [torch.randint(models.VOCABULARY, (2, 12), generator=random) for _ in range(4)]
        loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in batches]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_trainer_on_megatron_core_trains_a_transformers_model(axis: str, tmp_path: Path) -> None:
    model = models.gpt2()
    model.save_pretrained(tmp_path / "model")
    found = launch(
        *LAUNCHER, "--cpu", "--schedule", "gpt2", "--schedule-arg", "fuse_qkv=true", SCRIPT,
        "--hf-model", tmp_path / "model", f"--{axis}-model-parallel-size", 2, "--export", tmp_path / "out",
        cwd=tmp_path,
    )  # fmt: skip
    losses = [float(text) for text in re.findall(r"loss of step \d: ([\d.]+)", found.output)]
    assert losses == pytest.approx(losses_of_one_process(model), abs=2e-5)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SCRIPT], "Megatron needs CUDA, which is not available here; --cpu runs megatron-core on the CPU"),
        (["--cpu", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["--cpu", "--schedule", "gpt3", SCRIPT], "--schedule gpt3: no schedule 'gpt3'; did you mean 'gpt2'"),
        (["--cpu", "--schedule", "gpt2", "--schedule-arg", "fuse=1", SCRIPT], "has no option 'fuse'"),
        (["--cpu", "--schedule-arg", "fuse_qkv=1", SCRIPT], "--schedule-arg and --cuts are of a --schedule"),
    ],
    ids=["no CUDA", "no script", "no schedule", "no option", "an option of nothing"],
)
def test_what_cannot_run_starts_nothing(arguments: list[object], message: str, tmp_path: Path) -> None:
    found = launch(*LAUNCHER, *arguments, cwd=tmp_path, code=2)
    assert message in " ".join(found.output.split())
    assert "Traceback" not in found.output
