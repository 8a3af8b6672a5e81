"""The command `autopar diff`: two saved plans side by side.

autopar diff one.json two.json --model autopar.examples:gpt
"""

from __future__ import annotations

import argparse

from autopar.commands.arguments import SPEC, add_model, load_plan
from autopar.commands.printing import show, show_json
from autopar.commands.streams import to_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar diff`."""
    for name in ("first", "second"):
        parser.add_argument(
            name, metavar=name.upper(), help="A file that `autopar plan --out` wrote."
        )
    add_model(parser, required=False)
    parser.add_argument("--json", action="store_true", help="Print the differences as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Compare two plans and print the differences; times and memory only with the model."""
    first = load_plan(arguments.first, arguments.model)
    second = load_plan(arguments.second, arguments.model)
    diff = first.diff(second)
    if arguments.json:
        show_json(diff.to_json())
    else:
        show(diff)
        if diff.without_model:
            to_results(f"times, memory and movements are compared with --model {SPEC}")
    return 0
