"""The command `autopar explain`: why a plan is as it is, and what it would take elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.commands.arguments import load_plan
from autopar.commands.parsers import SPEC
from autopar.commands.plan_command import changed_options, make_plan
from autopar.commands.printing import show, show_json
from autopar.errors import InvalidInput
from autopar.plans.changes import CHANGES
from autopar.plans.plan import Plan
from autopar.plans.saved_value import read_file


def run(arguments: argparse.Namespace) -> int:
    """Plan or attach, explain, and print the answer."""
    changes = read_changes(arguments.what_if)
    if changes and arguments.model is None and arguments.name is not None:
        arguments.model, arguments.name = arguments.name, None  # SPEC, the last of the positionals
    _require_one_question(arguments)
    plan = _plan(arguments)
    if changes:
        search, seconds = arguments.search, arguments.seconds
        answer: Any = plan.what_if(**changes, search=search, seconds=seconds)
    else:
        answer = plan.explain(arguments.name)
    if arguments.json:
        show_json(answer.to_json())
    else:
        show(answer)
    return 0


def read_changes(text: str | None) -> dict[str, Any]:
    """Return a text such as `nodes=4,bandwidth=2x` as arguments of `what_if`."""
    changes: dict[str, str] = {}
    for part in () if text is None else text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in CHANGES or name in changes:
            raise InvalidInput(
                f"what is different is one of {', '.join(CHANGES)}, with what it becomes",
                got=repr(part),
                remedy="--what-if nodes=4,bandwidth=2x,sequence=32768",
            )
        changes[name] = value
    return changes


def _require_one_question(arguments: argparse.Namespace) -> None:
    questions = [word for word in (arguments.name, arguments.what_if) if word is not None]
    if len(questions) != 1 or (arguments.search and arguments.what_if is None):
        search = " with --search" * arguments.search
        raise InvalidInput(
            "one thing is explained: a NAME, or with --what-if another situation, which is "
            "searched with --search",
            got=(" and ".join(questions) or "nothing") + search,
            remedy="autopar explain plan.json stages --model SPEC, or --what-if nodes=4 for a name",
        )


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.model is None and not arguments.plan.endswith(".json"):
        return make_plan(arguments.plan, arguments)
    if arguments.model is None:
        read_file(arguments.plan)  # or there is none
        raise InvalidInput(
            "what a plan takes follows from its model",
            got=f"{Path(arguments.plan).name} alone",
            remedy=f"--model {SPEC}",
        )
    changed = changed_options(arguments)
    if arguments.search and "seconds" in changed:
        changed.remove("seconds")
    if changed:
        raise InvalidInput(
            "a plan from a file has been decided",
            got=", ".join(f"--{name}" for name in changed),
            remedy="leave them out, or give the model alone to plan it anew",
        )
    plan = load_plan(arguments.plan, arguments.model)
    assert isinstance(plan, Plan)
    return plan
