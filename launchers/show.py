"""``partbook show``: what a schedule makes of a model, on any mesh, in one process and without weights.

    partbook show ./llama --schedule llama --tp 2 --pp 4

prints the scheduled modules of one rank, the stages, and what crosses between them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partbook.core import Mesh, PartbookError, apply_schedule, create_schedule
from partbook.dialects.arguments import schedule_options
from partbook.dialects.cuts import AUTO, check_cuts, cut


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "show", help="what a schedule makes of a model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or config.json, or FILE.py:FUNCTION")
    parser.add_argument("--schedule", metavar="NAME|FILE.py:FUNCTION", help="default: none, the model as it is")
    parser.add_argument("--schedule-arg", action="append", default=[], metavar="KEY=VALUE")
    for axis, what in (("tp", "ranks that split each layer"), ("pp", "stages"), ("dp", "copies of the model")):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{what}; default: 1")
    parser.add_argument("--cuts", default=AUTO, metavar="auto|PATH,PATH", help="where stages end; default: auto")
    parser.add_argument("--rank", type=int, default=0, help="whose part is shown; default: 0")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print it. 2 is the exit code for what cannot be shown, with the reason on stderr."""
    try:
        check_cuts(options.cuts, options.pp)
        mesh = Mesh(dp=options.dp, pp=options.pp, tp=options.tp, rank=options.rank)
        sch = create_schedule(make_model(options.model), mesh)
        if options.schedule is not None:
            apply_schedule(sch, options.schedule, schedule_options(options.schedule_arg))
        if options.pp > 1:
            cut(sch, options.cuts, "cpu")
    except (PartbookError, ValueError, OSError) as error:
        print(f"partbook show: {error}", file=sys.stderr)
        return 2
    print(sch)
    return 0


def make_model(what: str) -> nn.Module:
    """The model on the meta device. Raises ValueError for what is no model."""
    with torch.device("meta"):
        if ".py:" in what:
            return _from_function(*what.rsplit(":", 1))
        return _from_config(Path(what))


def _from_config(path: Path) -> nn.Module:
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        raise ValueError(f"{str(path)!r} is no Hugging Face folder: it has no config.json")
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    for name in config.architectures or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)
    raise ValueError(
        f"the config of {str(path)!r} names no class of transformers: architectures={config.architectures}"
    )


def _from_function(file: str, name: str) -> nn.Module:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"there is no file {file!r} (looked in {Path.cwd()})")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"{file} has no function {name!r}")
    model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}() of {file} gives a {type(model).__name__}, no nn.Module")
    return model
