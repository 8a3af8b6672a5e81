"""Streams: a command's results go to its stdout, and nothing else does.

with heard(), results_apart():
    results().write("what was found")       # stdout
    print("by the user's own code")         # stderr, as is what processes and C code print
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from autopar.errors import InvalidInput

_RESULTS: ContextVar[TextIO | None] = ContextVar("results", default=None)


def results() -> TextIO:
    """Where what a command found is written."""
    return _RESULTS.get() or sys.stdout


def to_results(text: str) -> None:
    """Write a line there."""
    with _writing():
        print(text, file=results(), flush=True)


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Inside, whatever is printed goes to stderr, but for results."""
    own = sys.stdout
    if own is None:  # the shell has closed it: nobody wants them
        own = open(os.devnull, "w")  # noqa: SIM115
    place = own if _number(own) != 1 else _moved(own)
    token = _RESULTS.set(place)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(token)
        with _writing():
            place.flush() if place is own else _moved_back(place)


@contextmanager
def ignore_closed_stderr() -> Iterator[None]:
    """Inside, work goes on when nobody can read what it tells on stderr."""
    with redirect_stderr(_Forgiving(sys.stderr)):
        yield
        sys.stderr.flush()


class _Forgiving:
    """A stream to which nothing is written once that has failed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._failing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failing():
            self._stream.flush()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            if _number(self._stream) == 2:  # what is left goes nowhere as Python ends
                _to_nowhere(2)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InvalidInput(
            "what a command finds can be written",
            got=f"stdout: {error.strerror}",
            remedy="send it to where there is room",
        ) from None


def _moved(own: TextIO) -> TextIO:
    """The stream of stdout, which is stderr's from now on."""
    with suppress(OSError):
        own.flush()
    is_terminal = own.isatty()
    made = open(  # noqa: SIM115
        os.dup(1), "w", encoding=own.encoding, errors=own.errors, buffering=1 if is_terminal else -1
    )
    try:
        os.dup2(2, 1)
    except OSError:  # there is none
        _to_nowhere(1)
    return made


def _moved_back(stream: TextIO) -> None:
    os.dup2(stream.fileno(), 1)
    try:
        stream.close()
    except OSError:
        _to_nowhere(1)
        raise


def _number(stream: Any) -> int | None:
    """Which file of the process a stream writes to."""
    with suppress(OSError, ValueError, AttributeError):  # one of a test's, or of a notebook's
        return int(stream.fileno())
    return None


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
