"""The command `autopar plan`: find where every tensor of a model lives, without running it."""

from __future__ import annotations

import argparse
import warnings

from autopar.commands.arguments import check_out, load_call, read_cluster, read_decisions
from autopar.commands.parsers import add_plan
from autopar.commands.printing import show, show_json
from autopar.commands.streams import to_results
from autopar.planning import plan
from autopar.plans.plan import Plan


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
        "reserve": arguments.reserve,
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
