"""The command `autopar report`: write a plan as a page for a browser, one file.

autopar report autopar.examples:gpt --cluster dgx-h100 --out plan.html
autopar report plan.json --model autopar.examples:gpt
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from autopar.commands.arguments import SPEC, check_out, load_plan
from autopar.commands.plan_command import add_plan, changed_options, make_plan
from autopar.commands.printing import show_json
from autopar.commands.streams import to_results
from autopar.errors import InvalidInput
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar report`."""
    parser.add_argument(
        "what",
        metavar="PLAN|MODEL",
        help=f"A file that `autopar plan --out` wrote, or a model to plan, as {SPEC}.",
    )
    parser.add_argument("--model", metavar="SPEC", help="The model of a plan from a file.")
    add_plan(parser)
    parser.add_argument(
        "--out", metavar="FILE", default="plan.html", help="Write this file. Default: plan.html."
    )
    parser.add_argument("--json", action="store_true", help="Print the plan's figures as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Plan or attach, and write the page."""
    check_out(arguments)
    plan = _plan(arguments)
    plan.report(arguments.out)
    figures = {"page": arguments.out, **plan.to_json()}
    if arguments.json:
        show_json(figures)
    else:
        to_results(f"to look at: {arguments.out}")
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    place = Path(arguments.what)
    is_spec = ":" in arguments.what or place.suffix == ".py"
    if is_spec and not (place.is_file() and place.suffix != ".py"):
        if arguments.model is not None:
            raise InvalidInput(
                "a page is of one model",
                got=f"{arguments.what} and --model {arguments.model}",
                remedy="leave one of them out",
            )
        return make_plan(arguments.what, arguments)
    if arguments.model is None:
        raise InvalidInput(
            "a page is made of a plan and its model",
            got=f"{Path(arguments.what).name} alone",
            remedy=f"--model {SPEC}",
        )
    if changed := changed_options(arguments):
        raise InvalidInput(
            "a plan from a file has been decided",
            got=", ".join(f"--{name}" for name in changed),
            remedy="leave them out, or give the model alone to plan it anew",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = load_plan(arguments.what, arguments.model)
    assert isinstance(plan, Plan)
    return plan
