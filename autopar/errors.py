"""The errors of autopar: each gives the rule, the offending input, a remedy and the user's line.

>>> raise InvalidInput("a mesh axis cuts at most one dim of a tensor",
...                    got="('tp', 'tp')", remedy="name 'tp' once", source="train.py:12")
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from autopar.text.source_lines import caller
from autopar.text.suggestions import nearest

if TYPE_CHECKING:
    from torch import fx

_INDENT = "\n          "  # of what was given, and what goes on with it
WIDTH = 88  # characters of a line behind that
P = ParamSpec("P")
T = TypeVar("T")


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose.

    `source` is the user's line; if not given, the one that called into autopar.
    """

    def __init__(
        self,
        rule: str,
        *,
        got: object = None,
        remedy: str | None = None,
        source: str | None = None,
    ) -> None:
        self.rule, self.got, self.remedy = rule, got, remedy
        self.source = source or caller()
        super().__init__(rule)

    def __str__(self) -> str:
        parts = [self.rule]
        for label, value in (("given", self.got), ("remedy", self.remedy)):
            if value is not None:
                lines = (_filled(line) for line in str(value).split("\n"))
                parts.append(f"  {label + ':':<8}{_INDENT.join(lines)}")
        return "\n".join([*parts, *([f"  at:     {self.source}"] if self.source else [])])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.rule, str(self.got), self.remedy, self.source)


def _filled(line: str) -> str:
    """Wrap a line of a message between words."""
    if len(line) <= WIDTH:
        return line
    words = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{_INDENT}  ".join(words)


def _rebuild(kind: type[AutoparError], rule: str, got: str, remedy: str, source: str) -> object:
    return kind(rule, got=None if got == "None" else got, remedy=remedy, source=source)


class InvalidInput(AutoparError, ValueError):
    """An input that a rule forbids."""


def error_text(error: BaseException) -> str:
    """Return an error as `TypeError: its words`, even if its words cannot be printed."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot be printed"


def require_ending(path: str | Path, ending: str, what: str) -> None:
    """Refuse a file whose name promises another kind of content."""
    if Path(path).suffix.lower() != ending:
        raise InvalidInput(
            f"{what} is a {ending} file",
            got=str(path),
            remedy=f"{Path(path).stem}{ending}",
        )


def require_one_of(
    what: str, value: object, known: Sequence[str] | Mapping[str, str], others: str = ""
) -> None:
    """Refuse a word that is none of `known`.

    A mapping gives an explanation of each word. `others` names what may stand in place of a word.
    """
    if value not in known:
        means = known if isinstance(known, Mapping) else {}
        names = ", ".join(f"{name!r} ({means[name]})" if means else repr(name) for name in known)
        also = f", or {others}" if others else ""
        none = f"choose among these{also}; none of them means {value!r}"
        remedy = " or ".join(map(repr, nearest(str(value), [*known]))) or none
        raise InvalidInput(f"{what} is one of {names}{also}", got=repr(value), remedy=remedy)


def known_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return a method that refuses unknown arguments, with the names of those that it takes."""
    taken = inspect.signature(function)
    _, *names = taken.parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            taken.bind(*args, **kwargs)
        except TypeError as error:
            unknown = {name: value for name, value in kwargs.items() if name not in names}
            near = [known for name in unknown for known in nearest(name, names)] or names
            raise InvalidInput(
                f"{function.__name__}() takes {', '.join(names)}",
                got=", ".join(f"{name}={value!r}" for name, value in unknown.items()) or error,
                remedy=", ".join(f"{name}=..." for name in dict.fromkeys(near)),
            ) from None
        return function(*args, **kwargs)

    return call


class ExecutionError(AutoparError, RuntimeError):
    """A failure to carry out a program that was accepted."""


class Interrupted(ExecutionError):
    """A search that Ctrl-C ended before it had found any plan."""


def unforeseen(doing: str, node: fx.Node | None, error: Exception) -> AutoparError:
    """Return an unexpected error as one that names the operator and the user's line.

    This is the last resort: whatever can be foreseen is refused by its own rule.
    """
    if isinstance(error, AutoparError):
        return error
    return ExecutionError(
        f"{doing} every operator of a model",
        got=f"{node.target if node is not None else 'a model'}: {error_text(error)}",
        remedy="write this line otherwise, or make it an operator of its own by "
        "torch.library.custom_op, with a rule by register_rule()",
        source=node.meta.get("source") if node is not None else None,
    )


class VerifierError(ExecutionError):
    """A broken invariant of the graph: an error of a pass of autopar, not of its user."""
