"""The command `autopar verify`: train a model plain, captured and in parallel, and compare.

autopar verify autopar.examples:gpt --mesh dp=2,tp=2
autopar verify train.py:gpt --mesh pp=2,dp=2 --schedule 1f1b --microbatches 4

All ranks run in this process. Exit code 1 if the programs differ, or coarse numbers leave it open.
"""

from __future__ import annotations

import argparse
import warnings

from autopar.commands.arguments import (
    add_decisions,
    add_model,
    load_call,
    read_decisions,
)
from autopar.commands.printing import show, show_json
from autopar.verifying import RANKS, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar verify`."""
    add_model(parser)
    add_decisions(parser, f"a mesh of {RANKS} ranks is chosen")
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=3,
        help="The number of optimizer steps. Default: 3.",
    )
    parser.add_argument("--json", action="store_true", help="Print every comparison as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Train three programs, print the comparison, and return 1 if they differ."""
    options = read_decisions(arguments)
    model, args, kwargs = load_call(arguments.model)
    with warnings.catch_warnings():
        if arguments.json:
            warnings.simplefilter("ignore")
        verification = verify(model, args, kwargs, steps=arguments.steps, **options)
    if arguments.json:
        show_json(verification.to_json())
    else:
        show(verification)
    return 0 if verification.ok else 1
