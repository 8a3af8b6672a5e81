"""The command line: `autopar NAME ...`, or `python -m autopar.cli NAME ...`.

Exit codes: 0 all is well, 1 the command found something wrong, 2 the input was wrong, 3 autopar
itself failed, 130 Ctrl-C, 141 who read the output left.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

import autopar
from autopar.commands import command
from autopar.commands.parsers import make_parser
from autopar.commands.streams import ignore_closed_stderr, redirect_prints
from autopar.errors import AutoparError, InvalidInput, error_text


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    name = "autopar"
    with ignore_closed_stderr():
        try:
            parser = make_parser(autopar.__doc__ or "", autopar.__version__)
            arguments = parser.parse_args(words)
            name = f"autopar {arguments.command}"
            with redirect_prints():
                return _run(command(arguments.command).run, arguments)
        except AutoparError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{name}: stopped", file=sys.stderr)
            return 130
        except BrokenPipeError:  # as in `autopar plan ... | head`
            return 141
        except Exception as error:
            traceback.print_exc()
            print(
                f"{name}: an error of autopar's own: {error_text(error)}\n"
                "  remedy: please report it with the lines above",
                file=sys.stderr,
            )
            return 3


def _run(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; refuse a model whose code ends the process."""
    try:
        return int(run(arguments))
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        from autopar.capture.source import of_traceback  # loads torch, as the command has

        raise InvalidInput(
            "a model's code goes on to its end",
            got=f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else error_text(error),
            remedy="mend it there",
            source=of_traceback(error.__traceback__),
        ) from error


if __name__ == "__main__":
    sys.exit(main())
