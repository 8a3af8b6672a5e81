"""Streams by which a command's results, and nothing else, go to its stdout.

with ignore_closed_stderr(), redirect_prints():
    results().write("the plan")             # stdout
    print("by the user's own code")         # stderr, like all that processes and C code print
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
    """Return the stream that a command's results are written to."""
    return _RESULTS.get() or sys.stdout


def to_results(text: str) -> None:
    """Write a line of results."""
    with _writing():
        print(text, file=results(), flush=True)


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Send whatever is printed within a `with` to stderr, but for results."""
    stdout = sys.stdout
    if stdout is None:  # the shell has closed it: nobody wants them
        stdout = open(os.devnull, "w")  # noqa: SIM115
    place = stdout if _number(stdout) != 1 else _moved(stdout)
    token = _RESULTS.set(place)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(token)
        with _writing():
            place.flush() if place is stdout else _moved_back(place)


@contextmanager
def ignore_closed_stderr() -> Iterator[None]:
    """Let work within a `with` go on when nobody can read stderr any more."""
    with redirect_stderr(_Forgiving(sys.stderr)):
        yield
        sys.stderr.flush()


class _Forgiving:
    """A stream that ignores writing errors."""

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
            if _number(self._stream) == 2:  # Python would write the rest as it ends
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


def _moved(stdout: TextIO) -> TextIO:
    """Return a new stream to stdout's file, and let stdout write to stderr's from now on."""
    with suppress(OSError):
        stdout.flush()
    moved = open(  # noqa: SIM115
        os.dup(1),
        "w",
        encoding=stdout.encoding,
        errors=stdout.errors,
        buffering=1 if stdout.isatty() else -1,
    )
    try:
        os.dup2(2, 1)
    except OSError:  # there is none
        _to_nowhere(1)
    return moved


def _moved_back(stream: TextIO) -> None:
    os.dup2(stream.fileno(), 1)
    try:
        stream.close()
    except OSError:
        _to_nowhere(1)
        raise


def _number(stream: Any) -> int | None:
    """Return the descriptor of the file that a stream writes to; None if it has none."""
    with suppress(OSError, ValueError, AttributeError):  # as streams of tests and notebooks
        return int(stream.fileno())
    return None


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
