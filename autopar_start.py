"""The command `autopar` as it is installed: heard before torch is loaded, which takes seconds.

It stands outside of the package, whose import loads torch.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Say that the command has begun, where its progress is told, and run it."""
    words = sys.argv[1:]
    tells = words[:1] in (["plan"], ["report"]) and not {"--json", "--help", "-h"} & {*words}
    if tells:
        wiped = "\r" if sys.stderr.isatty() else "\n"
        print("loading torch", end=wiped, file=sys.stderr, flush=True)
    from autopar.cli import main as run

    if tells and sys.stderr.isatty():
        print(end="\x1b[2K", file=sys.stderr, flush=True)
    return run(words)
