"""Train with a schedule under the ``deepspeed`` launcher, without editing the script.

    python -m partbook.launchers.deepspeed --num_gpus 2 --schedule gpt2 --tp 2 train.py --deepspeed_config ds.json

starts the real ``deepspeed`` launcher, and is what that launcher runs on every rank; so this is the same:

    deepspeed --num_gpus 2 --module partbook.launchers.deepspeed --schedule gpt2 --tp 2 train.py ...

On a rank it runs the script with ``deepspeed.initialize`` replaced by the scheduled one, and with samplers that split
data over the data-parallel ranks instead of all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.launcher import runner

from partbook.core import find_schedule
from partbook.dialects.arguments import add_schedule_arguments, schedule_options
from partbook.dialects.cuts import check_cuts
from partbook.dialects.ranks import check_sizes

MODULE = "partbook.launchers.deepspeed"
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
# what the ranks have instead where DeepSpeed starts them with mpirun
_MPI_RANK_VARIABLES = {"OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.environ.keys() >= _RANK_VARIABLES or _MPI_RANK_VARIABLES & os.environ.keys():
        run_rank(arguments)
    else:
        start(arguments)


def start(argv: list[str]) -> None:
    """Hand ``argv`` to DeepSpeed's launcher: its own flags first, then this module with the schedule's flags.

    The schedule travels as arguments, which reach every node; environment variables do not.
    """
    parser = _launcher_parser()
    options = parser.parse_args(argv)
    _check(parser, options)
    # argparse has dropped a "--" beside the script
    *before_script, _ = [word for word in argv[: len(argv) - len(options.user_args)] if word != "--"]
    _, launcher_flags = _add_flags(_plain_parser()).parse_known_args(before_script)
    flags = [f"--schedule={options.schedule}", f"--tp={options.tp}"]
    flags += [f"--pp={options.pp}", f"--cuts={options.cuts}"] if options.pp > 1 else []
    flags += [f"--schedule-arg={pair}" for pair in options.schedule_arg]
    flags += [f"--export={options.export}"] if options.export else []
    flags += ["--script-module"] if options.module else []

    untouched = runner.encode_world_info

    def check_world(slots_by_host: dict[str, list[int]]) -> Any:
        """DeepSpeed has chosen its resources and starts nothing before this."""
        try:
            check_sizes(options.tp, options.pp, sum(len(slots) for slots in slots_by_host.values()))
        except ValueError as error:
            parser.error(f"{'--tp' if options.pp == 1 else '--tp, --pp'}: {error}")
        return untouched(slots_by_host)

    with mock.patch.object(runner, "encode_world_info", check_world):
        runner.main([*launcher_flags, "--module", MODULE, *flags, options.user_script, *options.user_args])


def run_rank(argv: list[str]) -> None:
    """Run the script of ``argv`` as ``__main__`` on this rank, under the schedule."""
    # DeepSpeed's launcher puts --local_rank first; the script gets it as if it had been launched itself.
    local_rank = [argument for argument in argv[:1] if argument.startswith(("--local_rank=", "--local-rank="))]
    parser = _add_flags(_plain_parser())
    parser.add_argument("--script-module", action="store_true", dest="module")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv[len(local_rank) :])
    schedule = _check(parser, options)
    sys.argv = [options.user_script, *local_rank, *options.user_args]

    from .intercept import intercept

    chosen = schedule_options(options.schedule_arg)
    with intercept(schedule, chosen, options.tp, options.export, pp=options.pp, cuts=options.cuts):
        if options.module:
            runpy.run_module(options.user_script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.user_script, run_name="__main__")


def _launcher_parser() -> argparse.ArgumentParser:
    """DeepSpeed's parser, and our flags in it. DeepSpeed only offers to parse with it (launcher/runner.py, 0.19)."""
    with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda parser, args: parser):
        parser = runner.parse_args()
    parser.prog = f"python -m {MODULE}"
    parser.usage = "%(prog)s [flags of the deepspeed launcher] --schedule NAME [--tp N] [--pp N] script.py [its flags]"
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return _add_flags(parser)


def _plain_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s --schedule NAME [--tp N] [--pp N] script.py [its flags]"
    return argparse.ArgumentParser(prog=f"python -m {MODULE}", usage=usage, add_help=False)


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_schedule_arguments(parser).add_argument(
        "--export", metavar="FOLDER", help="write a Hugging Face folder of the model when the script has finished"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Any:
    """The schedule, found. Ends the program with a message where the script or the schedule cannot be run."""
    script = options.user_script
    try:
        check_cuts(options.cuts, options.pp)
    except ValueError as error:
        parser.error(f"--cuts: {error}")
    if not options.schedule:
        parser.error("--schedule is missing: a name, or FILE.py:FUNCTION")
    if getattr(options, "no_python", False):
        parser.error("--no_python: a schedule reaches Python scripts only")
    if options.module:
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            parser.error(f"there is no module {script!r} (looked in {Path.cwd()} and what is installed)")
    elif not Path(script).is_file():
        parser.error(f"there is no script {script!r} (looked in {Path.cwd()})")
    elif not sys.flags.safe_path:
        # The schedule's file may import what lies beside the script, as the script itself does.
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        schedule = find_schedule(options.schedule)
        schedule.parse(schedule_options(options.schedule_arg))
    except ValueError as error:
        parser.error(f"--schedule {options.schedule}: {error}")
    return schedule


if __name__ == "__main__":
    main()
