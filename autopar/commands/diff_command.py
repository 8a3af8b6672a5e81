"""The command `autopar diff`: two saved plans side by side."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import load_plan
from autopar.commands.parsers import SPEC
from autopar.commands.printing import show, show_json
from autopar.commands.streams import to_results


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
