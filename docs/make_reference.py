"""Write the reference from docstrings: `make docs`, or `python docs/make_reference.py`.

The tests hold the pages to what this makes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

import autopar as ap
from autopar.commands import COMMANDS, command, examples, summary
from autopar.commands.arguments import CommandParser

FOLDER = Path(__file__).parent / "reference"
MODULES = ("autopar", "autopar.nn", "autopar.pipeline")
# Of a plan; its other members are for what makes it.
_OF_PLANS = (
    *("alternatives", "attach", "cost", "diff", "draw", "explain", "fallbacks", "fits", "graph"),
    *(
        "layouts",
        "load",
        "memory",
        "mesh",
        "microbatches",
        "movements",
        "program",
        "report",
        "save",
    ),
    *("seconds", "timeline", "to_json", "trace", "types", "what_if", "whole_mesh"),
)


def pages() -> dict[str, str]:
    """Each page by the name of its file."""
    return {"functions.md": "\n".join(_functions()), "commands.md": "\n".join(_commands())}


def _functions() -> Iterator[str]:
    yield "# Functions and classes\n"
    yield "What `import autopar as ap` has, from its docstrings.\n"
    for name in MODULES:
        module = importlib.import_module(name)
        if name != "autopar":
            yield f"## {name.replace('autopar', 'ap')}\n"
            yield f"{inspect.getdoc(module)}\n".partition("\n\n")[0] + "\n"
        for public in module.__all__:
            thing = getattr(module, public)
            if not inspect.ismodule(thing):
                yield from _thing(f"{name.replace('autopar', 'ap')}.{public}", thing)


def _thing(name: str, thing: Any) -> Iterator[str]:
    yield f"{'###' if name.count('.') > 1 else '##'} {name}\n"
    if inspect.isclass(thing):
        yield from _told(f"class {name}", thing if _says_how(thing) else None, thing)
        for member, function in sorted(_members(thing).items()):
            is_value = isinstance(function, property | cached_property)
            called = "" if is_value else _signature(function)
            yield f"- `.{member}{called}`: {_first(function)}"
        yield ""
    elif callable(thing):
        yield from _told(name, thing, thing)
    else:
        shown = ", ".join(map(str, thing)) if isinstance(thing, tuple) else repr(thing)
        yield f"{shown}\n"


def _told(name: str, callable_: Any, documented: Any) -> Iterator[str]:
    if callable_ is not None:
        yield f"```text\n{name}{_signature(callable_, is_member=False)}\n```\n"
    if said := inspect.getdoc(documented):
        yield f"{said}\n"


def _says_how(thing: type) -> bool:
    """Whether users make it themselves, by arguments with names."""
    return not issubclass(thing, Exception) and thing.__name__ not in ("Plan", "ParallelModule")


def _members(thing: type) -> dict[str, Any]:
    """What a class of autopar's, or one of those that it is made of, says of itself."""
    found: dict[str, Any] = {}
    for base in reversed(thing.__mro__):
        if not base.__module__.startswith("autopar"):
            continue
        for name, member in vars(base).items():
            told = property | cached_property | staticmethod | classmethod
            known = isinstance(member, told) or inspect.isfunction(member)
            of_torch = getattr(nn.Module, name, None)
            if known and not name.startswith("_") and member.__doc__ != of_torch.__doc__:
                found[name] = member
    told_of = _OF_PLANS if thing is ap.Plan else found
    return {name: member for name, member in found.items() if _first(member) and name in told_of}


def _first(member: Any) -> str:
    """The first paragraph of a member's own docstring, in one line."""
    return " ".join((member.__doc__ or "").partition("\n\n")[0].split())


def _signature(function: Any, is_member: bool = True) -> str:
    """Its arguments with their defaults, as they are given."""
    is_bound = is_member and not isinstance(function, staticmethod)
    parts, star = [], False
    given_to = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    for one in [*given_to][is_bound:]:
        if one.kind is one.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        star |= one.kind is one.VAR_POSITIONAL
        given = "" if one.default is one.empty else _value(one.default)
        parts.append(f"{text}={given}" if given else text)
    return f"({', '.join(parts)})"


def _value(default: Any) -> str:
    """A default, if it can be written down."""
    shown = repr(default)
    return "..." if "<" in shown or " object at " in shown else shown


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "`autopar COMMAND ...`, or `python -m autopar.cli COMMAND ...`."
    yield "Exit codes: 0 all is well, 1 the command found something wrong, 2 the input was wrong,"
    yield "3 autopar itself failed.\n"
    for name in COMMANDS:
        yield f"## autopar {name}\n"
        said = summary(name)
        yield f"{said[0].upper()}{said[1:]}.\n"
        yield "\n".join(("```console", *examples(name), "```\n"))
        parser = CommandParser(prog=f"autopar {name}", add_help=False)
        command(name).add_arguments(parser)
        for action in parser._actions:  # argparse tells of its actions nowhere else
            if action.help == argparse.SUPPRESS:
                continue
            words = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
            yield f"- `{words}`{choices}: {(action.help or '').replace('%%', '%')}"
        yield ""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
