"""``launch``: what a test sees of a command line that fails or hangs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from launch import launch, launch_all

HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_hang_is_killed_with_its_children_and_its_output_shown(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failed:
        launch_all([("-c", HANG), ("-c", "print('the other one')")], cwd=tmp_path, timeout=5)
    assert time.monotonic() - start < 30
    text = str(failed.value)
    assert "was still running after 5 s" in text
    assert "the other one" in text
    child = int((tmp_path / "output-0.log").read_text().split()[1])
    for _ in range(50):
        if not is_running(child):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_another_exit_code_fails_with_the_output(tmp_path: Path) -> None:
    program = "import sys; print('what went wrong'); sys.exit(3)"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with 3, not 0.*what went wrong"):
        launch("-c", program, cwd=tmp_path)
    assert launch("-c", program, cwd=tmp_path, code=3).output == "what went wrong\n"


def test_command_sees_no_world_of_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ended = launch("-c", "import os, sys; print('RANK' in os.environ, sys.executable)", cwd=tmp_path)
    assert ended.output.split() == ["False", sys.executable]
    assert os.environ["RANK"] == "1"
