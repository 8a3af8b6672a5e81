"""The commands of `autopar NAME`, one file for each; `plan_command.py` is the one to read first.

`parsers.py` has the arguments and the help of all of them. A command is a module with
`run(arguments) -> exit code`, known once its line stands in `COMMANDS` and its arguments in
`parsers.PARSERS`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

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
