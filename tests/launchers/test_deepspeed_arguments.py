"""The command line of the DeepSpeed launcher: who gets which argument, and what is refused before a rank starts."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.launcher import runner

from launch import launch
from partbook.launchers import deepspeed as launcher

PARTBOOK = "partbook.launchers.deepspeed"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with scripts; no process of a launcher's."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in (*launcher._RANK_VARIABLES, *launcher._MPI_RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def started(monkeypatch: pytest.MonkeyPatch, *argv: str) -> Namespace:
    """What DeepSpeed's own parser makes of the arguments that its launcher is started with."""
    seen: list[Namespace] = []
    monkeypatch.setattr(runner, "main", lambda arguments: seen.append(runner.parse_args(arguments)))
    launcher.main(argv)
    (options,) = seen
    assert options.module
    assert options.user_script == PARTBOOK
    return options


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--schedule gpt2", {}),
        ("--num_gpus 2 --schedule gpt2 --tp 2", {"num_gpus": 2}),
        ("--schedule gpt2 --num_gpus=2 --tp 2 --master_port 29511", {"num_gpus": 2, "master_port": 29511}),
        ("--include localhost:0,1 --schedule=gpt2", {"include": "localhost:0,1"}),
        ("-i localhost:0 --hostfile hosts --schedule=gpt2", {"include": "localhost:0", "hostfile": "hosts"}),
        ("--enable_each_rank_log logs --tp=2 --schedule gpt2 -q", {"enable_each_rank_log": "logs", "quiet": True}),
        ("--no_local_rank --schedule gpt2 --node_rank 1 --no_ssh", {"no_local_rank": True, "node_rank": 1}),
        ("--num_g 2 --schedule gpt2", {"num_gpus": 2}),
    ],
)
def test_flags_before_the_script_are_told_apart(
    flags: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = started(monkeypatch, *flags.split(), "train.py", "--num_gpus", "7", "--tp", "9", "--schedule", "x")
    assert vars(options).items() >= expected.items()
    tp = 2 if "--tp" in flags else 1
    # what stands after the script is the script's, whatever it looks like
    script = ["train.py", "--num_gpus", "7", "--tp", "9", "--schedule", "x"]
    assert options.user_args == ["--schedule=gpt2", f"--tp={tp}", *script]


def test_everything_of_ours_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--schedule gpt2 --schedule-arg fuse_qkv=true --export hf --tp 2 --schedule-arg=checkpoint_ratio=0.5"
    options = started(monkeypatch, *flags.split(), "train.py")
    assert options.user_args == [
        *("--schedule=gpt2", "--tp=2", "--schedule-arg=fuse_qkv=true", "--schedule-arg=checkpoint_ratio=0.5"),
        *("--export=hf", "train.py"),
    ]


@pytest.mark.parametrize("flags", ["--module --schedule gpt2", "--schedule gpt2 --module --num_gpus 2"])
def test_script_may_be_a_module(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = started(monkeypatch, *flags.split(), "package.train", "--module", "--tp", "3")
    ours = ["--schedule=gpt2", "--tp=1", "--script-module"]
    assert options.user_args == [*ours, "package.train", "--module", "--tp", "3"]


@pytest.mark.parametrize("after", [["-h", "--help", "a b", "--x=", ""], ["a", "--", "b"], ["--", "b"], ["--", "--"]])
def test_script_gets_what_deepspeed_would_give_it(after: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = runner.parse_args(["--num_gpus", "2", "train.py", *after])
    options = started(monkeypatch, "--num_gpus", "2", "--schedule", "gpt2", "train.py", *after)
    assert options.num_gpus == 2
    assert options.user_args == ["--schedule=gpt2", "--tp=1", "train.py", *alone.user_args]


def test_help_shows_both_kinds_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(["--num_gpus", "2", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--schedule NAME|FILE.py:FUNCTION",
        "--tp N",
        "--pp N",
        "--cuts auto|PATH,PATH",
        "--schedule-arg KEY=VALUE",
        "--hostfile",
        "--num_gpus",
    ):
        assert flag in text
    assert "--schedule NAME [--tp N] [--pp N] script.py [its flags]" in text


REFUSED = [
    ("--schedule gpt2", "the following arguments are required: user_script"),
    ("--num_gpus 2 train.py", "--schedule is missing: a name, or FILE.py:FUNCTION"),
    ("--schedule gpt2 trian.py", "there is no script 'trian.py' (looked in {folder})"),
    ("--schedule gpt2 --module packages.train", "there is no module 'packages.train' (looked in {folder}"),
    ("--schedule gpt-2 train.py", "--schedule gpt-2: no schedule 'gpt-2'; did you mean 'gpt2'? (one of your own: file"),
    ("--schedule lama train.py", "--schedule lama: no schedule 'lama'; did you mean 'llama'?"),
    ("--schedule mine.py:plan train.py", "there is no schedule file 'mine.py' (looked in {folder})"),
    ("--schedule train.py:plan train.py", "train.py has no function 'plan'; there are none"),
    (
        "--schedule gpt2 --schedule-arg fuse_qvk=1 train.py",
        "--schedule gpt2: schedule 'gpt2' has no option 'fuse_qvk'; did you mean 'fuse_qkv'",
    ),
    ("--schedule gpt2 --schedule-arg fuse_qkv=maybe train.py", "option fuse_qkv='maybe' of schedule 'gpt2' is no bool"),
    ("--schedule gpt2 --schedule-arg fuse_qkv train.py", "--schedule-arg 'fuse_qkv' is not KEY=VALUE"),
    (
        "--schedule gpt2 --schedule-arg fuse_qkv=1 --schedule-arg fuse_qkv=0 train.py",
        "--schedule-arg fuse_qkv was given twice: '1' and '0'",
    ),
    ("--schedule gpt2 --tp two train.py", "argument --tp: invalid int value: 'two'"),
    ("--schedule gpt2 --no_python train.py", "--no_python: a schedule reaches Python scripts only"),
    ("--schedule gpt2 --nun_gpus 2 train.py", "unrecognized arguments: --nun_gpus"),
    # DeepSpeed itself counts the ranks
    (
        "--schedule gpt2 --num_gpus 4 --tp 3 train.py",
        "--tp: tp=3 does not divide the world size 4; tp could be one of [1, 2, 4]",
    ),
    ("--schedule gpt2 --num_gpus 2 --tp 0 train.py", "--tp: tp=0 does not divide the world size 2"),
    ("--schedule gpt2 --hostfile hosts --no_ssh --master_addr a --node_rank 0 --tp 4 train.py", "the world size 6"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_run_is_refused_before_ranks_start(
    line: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hosts").write_text("first slots=2\nsecond slots=4\n")
    monkeypatch.setattr(runner, "subprocess", Namespace(Popen=lambda *_, **__: pytest.fail("it started ranks")))
    with pytest.raises(SystemExit) as ended:
        launcher.main(line.split())
    assert ended.value.code == 2
    assert message.format(folder=folder) in capsys.readouterr().err


def test_refusal_is_the_exit_code_of_the_command(tmp_path: Path) -> None:
    ended = launch("-m", PARTBOOK, "--num_gpus", 2, "--schedule", "gtp2", "train.py", cwd=tmp_path, code=2)
    assert "--schedule gtp2: no schedule 'gtp2'; did you mean 'gpt2'?" in ended.output.splitlines()[-1]


def on_rank(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Run the launcher as the only rank of a world."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(runner, "main", lambda _: pytest.fail("it started ranks of its own"))
    launcher.main(argv)


def test_schedule_is_found_before_the_script_changes_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative file was looked for when the script made its engine, wherever it was by then."""
    (folder / "plan.py").write_text("import helper\ndef plan(sch): pass\n")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "helper.py").write_text("")
    (folder / "scripts" / "train.py").write_text("import os, sys; os.chdir('/'); sys.exit(5)")
    with pytest.raises(SystemExit) as ended:
        on_rank(monkeypatch, "--schedule", "plan.py:plan", "scripts/train.py")
    assert ended.value.code == 5


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "sys.exit()"])
def test_script_that_makes_no_engine_is_told(ending: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").write_text(f"import sys\n{ending}\n")
    with pytest.raises(RuntimeError, match=r"made no engine with deepspeed\.initialize, so its model was not sch"):
        on_rank(monkeypatch, "--schedule", "gpt2", "train.py")


def test_error_of_the_script_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").write_text("raise LookupError('mine')")
    with pytest.raises(LookupError, match="mine"):
        on_rank(monkeypatch, "--schedule", "gpt2", "train.py")


def test_tp_that_does_not_divide_the_world_is_refused_on_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another launcher has started the ranks."""
    with pytest.raises(ValueError, match=r"tp=2 does not divide the world size 1; tp could be one of \[1\]"):
        on_rank(monkeypatch, "--schedule", "gpt2", "--tp", "2", "train.py")


def test_deepspeed_is_itself_again_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    before = deepspeed.initialize, dist.destroy_process_group, DistributedSampler.__init__
    check = "import deepspeed\nassert deepspeed.initialize.__module__ == 'deepspeed'\n"
    (folder / "train.py").write_text(check + "assert hasattr(deepspeed.initialize, '__wrapped__')\nraise KeyError")
    with pytest.raises(KeyError):
        on_rank(monkeypatch, "--schedule", "gpt2", "train.py")
    assert before == (deepspeed.initialize, dist.destroy_process_group, DistributedSampler.__init__)


def test_pipeline_module_of_the_script_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").write_text(
        "import deepspeed\n"
        "from deepspeed.pipe import PipelineModule\n"
        "deepspeed.initialize(model=PipelineModule.__new__(PipelineModule), config={})\n"
    )
    with pytest.raises(TypeError, match="makes a PipelineModule itself"):
        on_rank(monkeypatch, "--schedule", "gpt2", "train.py")


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"])
def test_process_of_mpirun_is_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no LOCAL_RANK, and would start a whole job of its own."""
    monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(runner, "main", lambda _: pytest.fail("it started ranks of its own"))
    with pytest.raises(RuntimeError, match="made no engine"):
        launcher.main(["--schedule", "gpt2", "--tp", "2", "train.py"])
