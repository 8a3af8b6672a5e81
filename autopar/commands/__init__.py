"""The commands of `autopar NAME`, one file for each; `plan_command.py` is the one to read first.

A command is a module with `add_arguments(parser)` and `run(arguments) -> exit code`. Its docstring
begins with "The command `autopar NAME`: what it does." and has lines "autopar NAME ...", its
examples. It is known once its line stands in `COMMANDS`.
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
    """Return the module of a command."""
    return importlib.import_module(COMMANDS[name])


def summary(name: str) -> str:
    """Return a command's summary, from the first line of its module."""
    first_line = (command(name).__doc__ or "").partition("\n")[0]
    return first_line.partition(": ")[2].rstrip(".")


def examples(name: str) -> list[str]:
    """Return examples of calls of a command, from its module's docstring."""
    lines = (command(name).__doc__ or "").splitlines()
    return [line.strip() for line in lines if line.startswith(f"autopar {name}")]


def make_parser(description: str, version: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="autopar", description=description)
    parser.add_argument("--version", action="version", version=f"autopar {version}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name in COMMANDS:
        text = summary(name).replace("%", "%%")
        shown = "\n  ".join(("examples:", *examples(name)))
        form = argparse.RawDescriptionHelpFormatter
        command_parser = commands.add_parser(
            name, help=text, description=text, epilog=shown, formatter_class=form
        )
        command(name).add_arguments(command_parser)
    return parser
