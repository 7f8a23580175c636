"""The command-line flags that say which schedule, for scripts that want them themselves."""

from __future__ import annotations

import argparse

from .cuts import AUTO


def add_schedule_arguments(parser: argparse.ArgumentParser, sizes: bool = True) -> argparse.ArgumentParser:
    """Add ``--schedule``, ``--tp``, ``--pp``, ``--cuts`` and ``--schedule-arg`` to a script's own parser.

    As ``deepspeed.add_config_arguments`` adds DeepSpeed's; ``initialize(args=...)`` reads them. Without ``sizes``, tp
    and pp are the runtime's own flags.
    """
    group = parser.add_argument_group("Partbook", "the schedule that runs the model in parallel")
    group.add_argument("--schedule", metavar="NAME|FILE.py:FUNCTION", help="a schedule by name, or one in a file")
    if sizes:
        group.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that split each layer; default: 1")
        group.add_argument("--pp", type=int, default=1, metavar="N", help="stages that it is cut into; default: 1")
    group.add_argument(
        "--cuts",
        default=AUTO,
        metavar="auto|PATH,PATH",
        help="modules after which a stage ends; default: auto, which balances FLOPs (auto:parameters, auto:time)",
    )
    group.add_argument(
        "--schedule-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the schedule; may be given several times",
    )
    return parser


def schedule_options(pairs: list[str]) -> dict[str, str]:
    """``["fuse_qkv=true"]`` as a dict. Raises ValueError for text without '=' and for a key given twice."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ValueError(f"--schedule-arg {pair!r} is not KEY=VALUE")
        if key in options:
            raise ValueError(f"--schedule-arg {key} was given twice: {options[key]!r} and {value!r}")
        options[key] = value
    return options
