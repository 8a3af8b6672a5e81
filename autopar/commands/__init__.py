"""Commands: what `autopar NAME` does, a file each.

A command is a module whose docstring begins with "The command `autopar NAME`: what it does.", and
has lines "autopar NAME ...", its examples; with `add_arguments(parser)` and `run(arguments) -> exit
code`. It is known once its line stands here.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from autopar.commands.arguments import CommandParser

COMMANDS = {
    "demo": "autopar.commands.demo",
    "plan": "autopar.commands.plan_command",
    "explain": "autopar.commands.explain_command",
    "diff": "autopar.commands.diff_command",
    "report": "autopar.commands.report_command",
    "compare": "autopar.commands.compare",
    "verify": "autopar.commands.verify",
    "simulate": "autopar.commands.simulate",
    "calibrate": "autopar.commands.calibrate",
    "doctor": "autopar.commands.doctor",
    "completion": "autopar.commands.completion",
}


def command(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(COMMANDS[name])


def summary(name: str) -> str:
    """What a command does, from the first line of its module."""
    first_line = (command(name).__doc__ or "").partition("\n")[0]
    return first_line.partition(": ")[2].rstrip(".")


def examples(name: str) -> list[str]:
    """How a command is called, from its module's docstring."""
    lines = (command(name).__doc__ or "").splitlines()
    return [line.strip() for line in lines if line.startswith(f"autopar {name}")]


def make_parser(description: str, version: str) -> argparse.ArgumentParser:
    """What reads the words of the command line."""
    parser = argparse.ArgumentParser(prog="autopar", description=description)
    parser.add_argument("--version", action="version", version=f"autopar {version}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name in COMMANDS:
        text = summary(name).replace("%", "%%")
        shown = "\n  ".join(("examples:", *examples(name)))
        form = argparse.RawDescriptionHelpFormatter
        one = commands.add_parser(
            name, help=text, description=text, epilog=shown, formatter_class=form
        )
        command(name).add_arguments(one)
    return parser
