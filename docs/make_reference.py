"""Write the reference of commands from their parsers: `python docs/make_reference.py`.

The reference of functions and classes needs no writing: the site takes it from docstrings.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from autopar.commands.parsers import PARSERS, CommandParser, examples, summary

PAGE = Path(__file__).parent / "reference" / "commands.md"


def page() -> str:
    """Return the page of all commands."""
    return "\n".join(_commands())


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "`autopar COMMAND ...`, or `python -m autopar.cli COMMAND ...`."
    yield "Exit codes: 0 all is well, 1 the command found something wrong, 2 the input was wrong,"
    yield "3 autopar itself failed.\n"
    for name, add_arguments in PARSERS.items():
        yield f"## autopar {name}\n"
        yield f"{summary(name)}.\n"
        yield "\n".join(("```console", *examples(name), "```\n"))
        parser = CommandParser(prog=f"autopar {name}", add_help=False)
        add_arguments(parser)
        for action in parser._actions:  # argparse tells of its actions nowhere else
            if action.help == argparse.SUPPRESS:
                continue
            words = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
            yield f"- `{words}`{choices}: {(action.help or '').replace('%%', '%')}"
        yield ""


def main() -> None:
    PAGE.write_text(page())
    print(PAGE)


if __name__ == "__main__":
    main()
