"""Fastest: of the ways that were weighed and fit, the fastest few that differ.

One, if a plan is all that is asked for; as many as are to be run, if these are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.pipeline.stages.stretch import NotAlike


@dataclass(frozen=True)
class Kept:
    """One of them, with its figures and the bytes of each device that its planner kept to."""

    figures: Alternative
    candidate: Candidate
    limit: float
    finish: Callable[[Candidate], Candidate]  # gives it the account of the whole search

    @property
    def seconds(self) -> float:
        return self.figures.seconds

    @property
    def finished(self) -> Candidate:
        return self.finish(self.candidate)


@dataclass
class Fastest:
    """At most `count` of them."""

    count: int = 1
    found: list[Kept] = field(default_factory=list)  # the fastest first

    @property
    def best(self) -> Candidate | None:
        return self.found[0].candidate if self.found else None

    @property
    def others(self) -> list[tuple[Candidate, float]]:
        """All but the best, with the bytes of each device; without those that a short program
        stands for and the whole one is not alike."""
        found = []
        for one in self.found[1:]:
            with suppress(NotAlike):
                found.append((one.finished, one.limit))
        return found

    @property
    def cutoff(self) -> float:
        """The seconds that another has to beat."""
        return self.found[-1].seconds if len(self.found) == self.count else math.inf

    def add(self, *some: Kept) -> None:
        """Ways that fit; of those that run alike the fastest stays."""
        ways: dict[str, Kept] = {}
        for one in sorted([*self.found, *some], key=lambda one: one.seconds):
            ways.setdefault(one.figures.how, one)
        self.found = list(ways.values())[: self.count]
