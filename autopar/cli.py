"""The command line: `autopar NAME ...`, or `python -m autopar.cli NAME ...`.

Exit codes: 0 all is well, 1 the command found something wrong, 2 the input was wrong, 3 autopar
itself failed, 130 Ctrl-C, 141 who read the output left.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import autopar
from autopar.commands import command, make_parser
from autopar.errors import AutoparError


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = make_parser(autopar.__doc__ or "", autopar.__version__)
    arguments = parser.parse_args(words)
    told = f"autopar {arguments.command}"
    try:
        code = int(command(arguments.command).run(arguments))
        sys.stdout.flush()
        return code
    except AutoparError as error:
        print(f"{told}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{told}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `autopar plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left goes nowhere as Python ends
        return 141
    except Exception as error:
        traceback.print_exc()
        print(
            f"{told}: an error of autopar's own: {type(error).__name__}: {error}\n"
            "  remedy: please report it with the lines above",
            file=sys.stderr,
        )
        return 3


if __name__ == "__main__":
    sys.exit(main())
