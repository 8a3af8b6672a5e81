"""The command `autopar plan`: find where every tensor of a model lives, without running it.

autopar plan autopar.examples:gpt --cluster dgx-h100 --nodes 2 --out plan.json
"""

from __future__ import annotations

import argparse
import warnings

from autopar.cluster.presets import NAMES as PRESETS
from autopar.commands.arguments import (
    add_decisions,
    add_model,
    check_out,
    complete_with,
    load_call,
    read_cluster,
    read_decisions,
)
from autopar.commands.printing import show, show_json
from autopar.commands.streams import to_results
from autopar.plan.plan import Plan
from autopar.planner.patience import SECONDS
from autopar.planning import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar plan`."""
    add_model(parser)
    add_plan(parser)
    parser.add_argument("--out", metavar="FILE", help="Save the plan to this file. Default: none.")
    parser.add_argument("--json", action="store_true", help="Print the plan's figures as JSON.")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is planned."""
    cluster = parser.add_argument(
        "--cluster",
        metavar="NAME",
        default="dgx-h100",
        help="The machines: a preset or a TOML file. Default: dgx-h100.",
    )
    complete_with(cluster, PRESETS)
    parser.add_argument(
        "--nodes", metavar="N", type=int, help="The number of nodes of a preset. Default: 1."
    )
    add_decisions(parser, "every mesh is weighed")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="The memory of each device that may be used, as 40GB. Default: all of it.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"The CPU seconds that a choice may take; inf for no limit. Default: {SECONDS:g}.",
    )


def changed_options(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the options of `add_plan` that differ from their defaults."""
    plain = argparse.ArgumentParser()
    add_plan(plain)
    return [name for name, v in vars(plain.parse_args([])).items() if getattr(arguments, name) != v]


def make_plan(spec: str, arguments: argparse.Namespace) -> Plan:
    """Return the plan of a model by the arguments of the command line."""
    options = {
        **read_decisions(arguments),
        "cluster": read_cluster(arguments.cluster, arguments.nodes),
        "memory": arguments.memory,
        "seconds": arguments.seconds,
    }
    model, args, kwargs = load_call(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the page lists what runs replicated
        return plan(model, args, kwargs, progress=None if arguments.json else True, **options)


def run(arguments: argparse.Namespace) -> int:
    """Plan a model, print the plan and save it."""
    check_out(arguments)
    planned = make_plan(arguments.model, arguments)
    if arguments.out is not None:
        planned.save(arguments.out)
    if arguments.json:
        show_json(planned.to_json())
    else:
        show(planned)
        if arguments.out is not None:
            to_results(f"saved to {arguments.out}")
    return 0
