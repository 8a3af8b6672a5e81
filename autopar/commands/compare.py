"""The command `autopar compare`: which predictions a measured trace shows to be off.

autopar compare simulated.json.gz measured.json.gz
"""

from __future__ import annotations

import argparse

from autopar.commands.printing import show_json, show_table
from autopar.report.trace import read
from autopar.report.trace_comparison import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar compare`."""
    parser.add_argument(
        "simulated", metavar="SIMULATED", help="The file that plan.trace(path) wrote."
    )
    parser.add_argument(
        "measured", metavar="MEASURED", help="The file that pm.record().save(path) wrote."
    )
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Read both traces, compare and print them."""
    simulated, measured = arguments.simulated, arguments.measured
    comparison = compare(read(simulated, "simulated"), read(measured, "measured"))
    if arguments.json:
        show_json(comparison.to_json())
    else:
        show_table(comparison.rows)
    return 0
