"""Commands: what `autopar NAME` does, a file each.

A command is a module whose docstring begins with "The command `autopar NAME`: what it does.", with
`add_arguments(parser)` and `run(arguments) -> exit code`. It is known once its line stands here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

COMMANDS = {
    "demo": "autopar.commands.demo",
    "plan": "autopar.commands.plan",
    "explain": "autopar.commands.explain",
    "diff": "autopar.commands.diff",
    "report": "autopar.commands.report",
    "compare": "autopar.commands.compare",
    "verify": "autopar.commands.verify",
    "simulate": "autopar.pipeline.command",
    "doctor": "autopar.commands.doctor",
}


def command(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(COMMANDS[name])


def summary(name: str) -> str:
    """What a command does, from the first line of its module."""
    first_line = (command(name).__doc__ or "").partition("\n")[0]
    return first_line.partition(": ")[2].rstrip(".")
