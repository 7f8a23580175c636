"""``partbook show``: any mesh, one process, no weights; bad input has a message and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from partbook.launchers import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config without weights: nothing else is read."""
    for name in ("gpt2", "llama"):
        model = models.on_meta(getattr(models, name), layers=4)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path / name)
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))\n"
        "def broken(): return 7\n"
    )
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", *map(str, argv)])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_stages_and_what_crosses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = show(capsys, folder / "llama", "--schedule", "llama", "--tp", 2, "--pp", 2, "--rank", 3)
    assert code == 0
    assert "[dp=1 pp=2 tp=2, rank 3, virtual]" in out
    assert "q_proj: Linear  weight [16, 32]" in out
    assert "1: LlamaDecoderLayer  | end of a stage" in out
    crossing = out[out.index("  after model.layers.1:") :].splitlines()
    # the hidden state and nothing else
    assert crossing[1] == "    model_layers_1 [B, S, 32] float32, 3,584 bytes, and its gradient"
    assert crossing[2].startswith("  stage 1: model.layers.2 to lm_head")
    assert "reads labels, attention_mask of the batch" in crossing[2]


def test_cuts_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cuts = "transformer.h.0,transformer.h.2"
    _, out, _ = show(capsys, folder / "gpt2" / "config.json", "--pp", 3, "--cuts", cuts)
    assert "  after transformer.h.0:\n    transformer_h_0 [B, S, 32] float32" in out
    assert "  after transformer.h.2:\n    transformer_h_2 [B, S, 32] float32" in out


def test_model_of_a_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = show(capsys, f"{folder / 'own.py'}:make")
    assert code == 0
    assert "(model): Sequential" in out
    assert "0: Linear  weight [3, 2]  bias [3]" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "'nowhere' is no Hugging Face folder: it has no config.json"),
        (["gpt2", "--schedule", "gpt3"], "no schedule 'gpt3'; did you mean"),
        (["gpt2", "--schedule", "gpt2", "--tp", "3"], "attention heads do not divide by tp=3"),
        (["gpt2", "--pp", "2", "--cuts", "transformer.h.9"], "there is no module 'transformer.h.9'"),
        (["gpt2", "--pp", "3", "--cuts", "transformer.h.0"], "1 cuts make 2 stages, and pp=3: give 2 paths"),
        (["gpt2", "--pp", "2", "--cuts", "auto:weight"], "balanced by one of parameters, flops, time"),
        (["gpt2", "--rank", "4"], "rank 4 lies outside the mesh"),
        (["own.py:broken"], "broken() of own.py gives a int, no nn.Module"),
        (["own.py:absent"], "own.py has no function 'absent'"),
        (["none.py:make"], "there is no file 'none.py'"),
    ],
)
def test_bad_input_has_a_message(
    argv: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = show(capsys, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
