"""The command `autopar report`: write a plan as a page for a browser, one file."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from autopar.commands.arguments import check_out, load_plan
from autopar.commands.parsers import SPEC
from autopar.commands.plan_command import changed_options, make_plan
from autopar.commands.printing import show_json
from autopar.commands.streams import to_results
from autopar.errors import InvalidInput
from autopar.plans.plan import Plan


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
