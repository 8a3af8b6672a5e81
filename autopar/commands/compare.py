"""The command `autopar compare`: which predictions a measured trace shows to be off."""

from __future__ import annotations

import argparse

from autopar.commands.printing import show_json, show_table
from autopar.report.trace import read
from autopar.report.trace_comparison import compare


def run(arguments: argparse.Namespace) -> int:
    """Read both traces, compare and print them."""
    simulated, measured = arguments.simulated, arguments.measured
    comparison = compare(read(simulated, "simulated"), read(measured, "measured"))
    if arguments.json:
        show_json(comparison.to_json())
    else:
        show_table(comparison.rows)
    return 0
