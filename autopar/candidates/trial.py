"""Trial: a plan of which some steps were run, so that the fastest could be taken.

pm = parallelize(model, args, profile=10)
pm.plan.trials                               # the fastest first: it was taken
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.base.schema import Positive
from autopar.text.units import seconds_text


@dataclass(frozen=True)
class Trial:
    """What was predicted of a step, and what it took."""

    how: str  # as `Alternative` says it
    predicted: Positive  # seconds
    measured: Positive | None  # the median of its steps, each the slowest rank's
    why: str = ""  # it was not measured

    @property
    def order(self) -> float:
        """The fastest first, what did not run last."""
        return math.inf if self.measured is None else self.measured

    def __str__(self) -> str:
        taken = self.why or f"{seconds_text(self.measured or 0.0)} measured"
        return f"{self.how}: {seconds_text(self.predicted)} predicted, {taken}"


def measured(trials: Sequence[Trial]) -> dict[str, float]:
    """The seconds of those that were run, by how they run."""
    return {one.how: one.measured for one in trials if one.measured is not None}


def rows_of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """A table under its heading."""
    rows: list[tuple[str, ...]] = [("", "measured", "predicted")]
    for number, one in enumerate(trials):
        taken = one.why if one.measured is None else seconds_text(one.measured)
        mark = "  " if number else "* "
        rows.append((f"{mark}{one.how}", taken, seconds_text(one.predicted)))
    return rows
