"""``partbook``: the tools around schedules that need no training job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import show


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="partbook", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show.add_command(commands)
    options = parser.parse_args(argv)
    sys.exit(options.run(options))


if __name__ == "__main__":
    main()
