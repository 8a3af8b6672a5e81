"""The command `autopar diff`: two saved plans side by side.

autopar diff one.json two.json --model autopar.examples:gpt
"""

from __future__ import annotations

import argparse
import json

from autopar.commands.arguments import SPEC, add_model, load_plan
from autopar.commands.printing import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `autopar diff` takes."""
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help="a file that `autopar plan` wrote")
    add_model(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Load, compare, print. With the model, times, memory and movements are compared too."""
    first = load_plan(arguments.first, arguments.model)
    second = load_plan(arguments.second, arguments.model)
    found = first.diff(second)
    if arguments.json:
        print(json.dumps(found.to_json()))
    else:
        show(found)
        if found.without_model:
            print(f"times, memory and movements are compared with --model {SPEC}")
    return 0
