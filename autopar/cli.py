"""The command line: `autopar NAME ...`, or `python -m autopar.cli NAME ...`.

Exit codes: 0 all is well, 1 the command found something wrong, 2 the input was wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import autopar
from autopar.commands import COMMANDS, command, summary
from autopar.commands.arguments import CommandParser
from autopar.errors import AutoparError


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = _parser().parse_args(words)
    try:
        return int(command(arguments.command).run(arguments))
    except AutoparError as error:
        print(f"autopar {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autopar {arguments.command}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description=autopar.__doc__)
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name in COMMANDS:
        text = summary(name).replace("%", "%%")
        command(name).add_arguments(commands.add_parser(name, help=text, description=text))
    return parser


if __name__ == "__main__":
    sys.exit(main())
