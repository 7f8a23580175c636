"""Train with a schedule under the ``deepspeed`` launcher, without editing the script.

    python -m partbook.launchers.deepspeed --num_gpus 2 --schedule gpt2 --tp 2 train.py --deepspeed_config ds.json

starts the real ``deepspeed`` launcher, and is what that launcher runs on every rank; so this is the same:

    deepspeed --num_gpus 2 --module partbook.launchers.deepspeed --schedule gpt2 --tp 2 train.py --deepspeed_config ds.json

On a rank it runs the script with ``deepspeed.initialize`` replaced by the scheduled one, and with samplers that split
data over the data-parallel ranks instead of all of them.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

MODULE = "partbook.launchers.deepspeed"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if all(name in os.environ for name in _RANK_VARIABLES):
        run_rank(arguments)
    else:
        start(arguments)


def start(argv: list[str]) -> None:
    """Hand ``argv`` to DeepSpeed's launcher: its own flags first, then this module with the schedule's flags.

    The schedule travels as arguments, which reach every node; environment variables do not.
    """
    from deepspeed.launcher import runner

    ours, rest = _own_flags(argv)
    script = runner.parse_args(rest).user_script
    split = rest.index(script)
    launcher_flags = rest[:split]
    is_module = "--module" in launcher_flags
    flags = [flag for flag in launcher_flags if flag != "--module"]
    # Refuses what is wrong with the schedule's flags here, once, and not on every rank.
    options = _parse([*ours, script])
    _check_schedule(options)
    runner.main([*flags, "--module", MODULE, *ours, *(["--script-module"] if is_module else []), *rest[split:]])


def run_rank(argv: list[str]) -> None:
    """Run the script of ``argv`` as ``__main__`` on this rank, under the schedule."""
    # DeepSpeed's launcher puts --local_rank first; the script gets it as if it had been launched itself.
    local_rank = [argument for argument in argv[:1] if argument.startswith("--local_rank")]
    options = _parse(argv[len(local_rank) :])
    sys.argv = [options.script, *local_rank, *options.script_args]
    # The schedule's file may import what lies beside the script, as the script itself does.
    sys.path[0] = os.getcwd() if options.script_module else str(Path(options.script).resolve().parent)

    from .intercept import intercept

    with intercept(options.schedule, options.schedule_arg, options.tp) as engines:
        if options.script_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
        if options.export:
            _export(engines, options.export)


def _export(engines: list[object], folder: str) -> None:
    from partbook.dialects.deepspeed import save_pretrained

    if not engines:
        raise SystemExit("--export: the script made no engine with deepspeed.initialize")
    save_pretrained(engines[0], folder)


def _parser() -> argparse.ArgumentParser:
    from partbook.dialects.deepspeed.arguments import add_schedule_arguments

    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        usage="%(prog)s [flags of the deepspeed launcher] --schedule NAME [--tp N] script.py [its flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_schedule_arguments(parser)
    parser.add_argument("--export", metavar="FOLDER", help="write a Hugging Face folder when the script has finished")
    parser.add_argument("--script-module", action="store_true", help="the script is a module name")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.schedule:
        parser.error("--schedule is missing: a name, or FILE.py:FUNCTION")
    if options.tp < 1:
        parser.error(f"--tp {options.tp}: at least 1")
    return options


def _own_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """The flags of Partbook that stand before the script, and ``argv`` without them."""
    from deepspeed.launcher import runner

    with_value = {"--schedule", "--tp", "--schedule-arg", "--export"}
    ours: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(argv):
        name, has_value, _ = argv[i].partition("=")
        if name in ("-h", "--help"):
            _parser().print_help()
            print("\nThe flags of the deepspeed launcher: deepspeed --help")
            raise SystemExit(0)
        if name in with_value:
            ours += argv[i : i + (1 if has_value else 2)]
            i += 1 if has_value else 2
            continue
        rest.append(argv[i])
        i += 1
        # Once DeepSpeed's parser finds a script, what follows belongs to it.
        if not argv[i - 1].startswith("-") and runner_finds_script(runner, rest):
            return ours, rest + argv[i:]
    if not rest:
        _parser().error("the script to run is missing")
    return ours, rest


def runner_finds_script(runner: object, arguments: list[str]) -> bool:
    """Whether DeepSpeed's own parser takes the last of ``arguments`` for the script, not for a flag's value."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return runner.parse_args(arguments).user_script == arguments[-1]  # type: ignore[attr-defined]
        except SystemExit:
            return False


def _check_schedule(options: argparse.Namespace) -> None:
    from partbook.core import find_schedule
    from partbook.dialects.deepspeed.arguments import schedule_options

    if not options.script_module and not Path(options.script).is_file():
        raise SystemExit(f"there is no script {options.script!r} (looked in {Path.cwd()})")
    sys.path.insert(0, os.getcwd() if options.script_module else str(Path(options.script).resolve().parent))
    try:
        find_schedule(options.schedule).parse(schedule_options(options.schedule_arg))
    except ValueError as error:
        raise SystemExit(f"--schedule {options.schedule}: {error}") from error


if __name__ == "__main__":
    main()
