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
    """The predicted and the measured seconds of one way to run a step."""

    how: str  # `Alternative.how`
    predicted: Positive  # seconds
    measured: Positive | None  # the median of its steps, each the slowest rank's
    why: str = ""  # it was not measured

    @property
    def order(self) -> float:
        """Return the key that sorts the fastest first, and what did not run last."""
        return math.inf if self.measured is None else self.measured

    def __str__(self) -> str:
        taken = self.why or f"{seconds_text(self.measured or 0.0)} measured"
        return f"{self.how}: {seconds_text(self.predicted)} predicted, {taken}"


def measured(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the measured seconds of trials that were run, by how they run."""
    return {trial.how: trial.measured for trial in trials if trial.measured is not None}


def rows_of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return the rows of a table of trials, its heading first."""
    rows: list[tuple[str, ...]] = [("", "measured", "predicted")]
    for number, trial in enumerate(trials):
        taken = trial.why if trial.measured is None else seconds_text(trial.measured)
        mark = "  " if number else "* "
        rows.append((f"{mark}{trial.how}", taken, seconds_text(trial.predicted)))
    return rows
