"""Patience: how long the best way is looked for.

patience = Patience.begun(10.0, captured=2.0)   # of this process, from now on: capture took two
patience.is_over()                              # the best so far is taken
patience.is_late()                              # what takes least memory, if nothing was found
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from autopar.errors import InvalidInput
from autopar.text.source_lines import shorten

SECONDS = 10.0
_STEP = 0.04  # of all: between two looks at the clock
_LAST = 0.2  # of what capture took: the program of what was chosen is made of all calls
_FIRST = 0.6  # of the time, for what promises most
_AGES = 1e12
_LATE = 5

# What ended a choice before all was weighed; "": nothing did.
Ended = Literal["", "time", "Ctrl-C"]


@dataclass(frozen=True)
class Patience:
    """Seconds of this process, of all its threads together, and when they are over."""

    seconds: float = math.inf
    until: float = math.inf

    @classmethod
    def begun(cls, seconds: float | None, captured: float = 0.0) -> Patience:
        """Return the time from now on. At most half of it is reserved for the last step, which
        makes the chosen program of all calls, as capture did. None, or ages: there is no end."""
        if seconds is None or seconds >= _AGES:
            return cls()
        total = float(seconds)
        reserved = min(_LAST * captured + _STEP * total, total / 2)
        return cls(total, time.process_time() + total - reserved)

    def shared(self, others: int) -> Patience:
        """Return the part of what is left that the first of several searches has."""
        if not others or self.until == math.inf:
            return self
        now = time.process_time()
        return Patience(self.seconds, now + max(0.0, self.until - now) * _FIRST)

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return time.process_time() >= self.until

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.process_time()

    def is_half_over(self) -> bool:
        """Return whether half of the time has gone by."""
        return time.process_time() >= self.until - self.seconds / 2

    def is_late(self) -> bool:
        """Return whether several times as much is over: what takes least memory is seldom fast."""
        return time.process_time() >= self.until + _LATE * max(self.seconds, SECONDS)


FOREVER = Patience()


def require_seconds(name: str, value: object) -> None:
    """Refuse what is no amount of time."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]
        raise InvalidInput(
            f"{name} is a number above 0, or None for all that the choice takes",
            got=f"{shorten(f'{name}={value!r}')}, of type {type(value).__name__}",
            remedy=f"{name}=60",
        )
