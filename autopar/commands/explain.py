"""The command `autopar explain`: why a parameter, module or operator of a plan is where it is.

autopar explain plan.json layers.0.up --model autopar.examples:gpt
"""

from __future__ import annotations

import argparse
import json

from autopar.commands.arguments import add_model, load_plan
from autopar.commands.printing import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `autopar explain` takes."""
    parser.add_argument("plan", metavar="PLAN", help="a file that `autopar plan --out` wrote")
    parser.add_argument("name", metavar="NAME", help="of a parameter, a module or a node")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print all candidates as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Attach, explain, print."""
    explanation = load_plan(arguments.plan, arguments.model).explain(arguments.name)
    if arguments.json:
        print(json.dumps(explanation.to_json()))
    else:
        show(explanation)
    return 0
