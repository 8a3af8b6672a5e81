"""The command `autopar` as it is installed: it says that it has begun, and hears Ctrl-C, before
commands load torch, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Say that the command has begun, where its progress is told, and run it."""
    words = sys.argv[1:]
    tells = words[:1] in (["plan"], ["report"]) and not {"--json", "--help", "-h"} & {*words}
    tells = tells and sys.stderr is not None
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, _stop)
    if tells:
        wiped = "\r" if sys.stderr.isatty() else "\n"
        with suppress(OSError):
            print("loading torch", end=wiped, file=sys.stderr, flush=True)
    from autopar.cli import main as run

    if tells and sys.stderr.isatty():
        print(end="\x1b[2K", file=sys.stderr, flush=True)
    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(words)


def _stop(*_: object) -> None:
    """While modules load, whatever they do about Ctrl-C."""
    name = " ".join(["autopar", *sys.argv[1:2]])
    with suppress(OSError):
        os.write(2, f"{name}: stopped\n".encode())
    os._exit(130)
