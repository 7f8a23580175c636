"""Train with a schedule under Megatron: torchrun, and on request megatron-core's real code on the CPU.

    python -m partbook.launchers.megatron --nproc-per-node 4 --schedule llama pretrain_hf.py \\
        --tensor-model-parallel-size 2 ...

The first flags are torchrun's, all of which still work, with ours among them; they come before the script. The
schedule's flags are handed to the script, which takes them by ``add_schedule_arguments``. Sizes of tp and pp are
Megatron's own flags.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.run import get_args_parser, run

from partbook.core import find_schedule
from partbook.dialects.arguments import schedule_options

MODULE = "partbook.launchers.megatron"
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.environ.keys() >= _RANK_VARIABLES:
        run_rank(arguments)
    else:
        start(arguments)


def start(argv: list[str]) -> None:
    """Have torchrun start this module on every rank, in front of the script."""
    parser = _add_flags(get_args_parser())
    parser.prog, parser.description = f"python -m {MODULE}", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args(argv)
    _check(parser, options)
    ours = ["--cpu"] if options.cpu else []
    ours += [f"--schedule={options.schedule}"] if options.schedule else []
    ours += [f"--cuts={options.cuts}"] if options.cuts else []
    ours += [f"--schedule-arg={pair}" for pair in options.schedule_arg]
    ours += ["--script-module"] if options.module else []
    script = [*ours, options.training_script, *options.training_script_args]
    options.module, options.training_script, options.training_script_args = True, MODULE, script
    run(options)


def run_rank(argv: list[str]) -> None:
    """Run the script of ``argv`` as ``__main__`` on this rank."""
    parser = _add_flags(argparse.ArgumentParser(prog=f"python -m {MODULE}", add_help=False))
    parser.add_argument("--script-module", action="store_true", dest="module")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    _check(parser, options)
    flags = [f"--schedule={options.schedule}"] if options.schedule else []
    flags += [f"--cuts={options.cuts}"] if options.cuts else []
    flags += [f"--schedule-arg={pair}" for pair in options.schedule_arg]
    sys.argv = [options.training_script, *options.training_script_args, *flags]
    # Megatron's layers count on kernels that start in the order in which they are called.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _cpu() if options.cpu else contextlib.nullcontext():
        if options.module:
            runpy.run_module(options.training_script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.training_script, run_name="__main__")


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("Partbook", "the schedule that runs the model in parallel")
    group.add_argument("--schedule", metavar="NAME|FILE.py:FUNCTION", help="a schedule by name, or one in a file")
    group.add_argument("--cuts", metavar="auto|PATH,PATH", help="modules after which a stage ends; default: auto")
    group.add_argument(
        "--schedule-arg", action="append", default=[], metavar="KEY=VALUE", help="an option of the schedule"
    )
    group.add_argument(
        "--cpu", action="store_true", help="run megatron-core on the CPU, on a machine without CUDA: to try and to test"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a message where the script or the schedule cannot be run."""
    script = options.training_script
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        parser.error("megatron-core is not installed: pip install 'megatron-core>=0.16.1'")
    if options.cpu and torch.cuda.is_available():
        parser.error("--cpu is for machines without CUDA, and here CUDA is available")
    if not options.cpu and not torch.cuda.is_available():
        parser.error("Megatron needs CUDA, which is not available here; --cpu runs megatron-core on the CPU")
    if not options.module and not Path(script).is_file():
        parser.error(f"there is no script {script!r} (looked in {Path.cwd()})")
    if not options.module and not sys.flags.safe_path:
        # What lies beside the script it may import, as if it had been started itself.
        sys.path[0] = str(Path(script).resolve().parent)
    if options.schedule is None:
        if options.schedule_arg or options.cuts:
            parser.error("--schedule-arg and --cuts are of a --schedule, and there is none")
        return
    try:
        find_schedule(options.schedule).parse(schedule_options(options.schedule_arg))
    except ValueError as error:
        parser.error(f"--schedule {options.schedule}: {error}")


@contextlib.contextmanager
def _cpu() -> Iterator[None]:
    """megatron-core's stand-in for CUDA, and where Megatron-LM is, what its initialisation takes for granted."""
    from partbook.dialects.megatron import on_cpu

    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cpu())
        if importlib.util.find_spec("megatron.training") is not None:
            stack.enter_context(_megatron_lm())
        yield


@contextlib.contextmanager
def _megatron_lm() -> Iterator[None]:
    """Megatron-LM (0.16) without its CUDA kernels, which it would compile, nor triton's, which it only imports."""
    kernels = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    known = {} if importlib.util.find_spec("triton") else {kernels: _Stub(kernels)}
    with mock.patch.dict(sys.modules, known):
        from megatron.training import arguments, initialize, training

        untouched = training.initialize_megatron

        def without_cuda(*args: object, **kwargs: object) -> object:
            return untouched(*args, **{**kwargs, "allow_no_cuda": True})

        with (
            mock.patch.object(training, "initialize_megatron", without_cuda),
            mock.patch.object(initialize, "_compile_dependencies"),
            # Its arguments depend on the generation of the device.
            mock.patch.object(arguments, "get_device_arch_version", return_value=8),
        ):
            yield


class _Stub(types.ModuleType):
    """A module whose names are there and do nothing: no CPU run calls them."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


if __name__ == "__main__":
    main()
