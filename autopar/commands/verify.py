"""The command `autopar verify`: train a model plain, captured and in parallel, and compare.

All ranks run in this process. Exit code 1 if the programs differ, or coarse numbers leave it open.
"""

from __future__ import annotations

import argparse
import warnings

from autopar.commands.arguments import load_call, read_decisions
from autopar.commands.printing import show, show_json
from autopar.verifying import verify


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
