"""Ledger: what came of the ways that were looked at: those that fit, the fastest first, and of the
others how much they take.

    ledger = Ledger(request)
    ledger.add(figures, candidate, finish)  # with its figures; `finish` gives it its account
    ledger.fastest                          # the seconds that another way has to beat
    ledger.refusal(regions, captured)       # where nothing fits
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.candidates.room_checks import no_room_on_host
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.planner.fastest import Fastest, Kept
from autopar.planner.recomputation import Regions
from autopar.planner.request import Request
from autopar.planner.staged import StagedWay
from autopar.planner.verdict import nothing, too_large
from autopar.search.layout_search import OutOfTime
from autopar.search.smallest_footprint import SmallestFootprint

EQUAL = 1e-9  # relative: what differs by less is as fast, and the first is taken


@dataclass
class Ledger:
    """Of the ways to run a step that one request asks for."""

    request: Request
    kept: Fastest = field(init=False)  # that fit
    fastest: float = field(init=False)  # the seconds of the last of them
    # By bounds; by a guess, "unlikely": sizes, "unlike": layouts.
    left_out: Counter[str] = field(default_factory=Counter)
    weighed: list[Alternative] = field(default_factory=list)
    refused: list[SmallestFootprint] = field(default_factory=list)  # too large
    dropped: list[Candidate] = field(default_factory=list)  # too large though all runs again
    is_bound: bool = False  # memory kept the last layouts from what would be faster
    fits_device: bool = False  # some way does, with no states on the host but what was asked for
    fits_itself: bool = False  # some way does, with nothing there
    is_last: bool = False  # what takes least is looked for: after it there is nothing
    leanest: StagedWay | None = None  # of those of which it was clear that they are too large
    _too_large_for_host: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept, self.fastest = Fastest(self.request.wanted), self.request.fastest

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All that was weighed, the best first."""
        return best_first(self.weighed)

    def add(
        self, figures: Alternative, candidate: Candidate, finish: Callable[[Candidate], Candidate]
    ) -> None:
        """A way with its figures."""
        self.weighed.append(figures)
        memory = self.request.memory
        on_device = figures.fits and candidate.states not in self.request.hosted
        self.fits_device |= on_device
        self.fits_itself |= on_device and not candidate.decisions.keeps_on_host
        if candidate.needed(memory) <= memory and candidate.fullest_host.room < 0:
            self._too_large_for_host.append(candidate)
        elif not figures.fits:
            self.refused.append(candidate.footprint(figures))
        elif figures.seconds < self.fastest * (1 - EQUAL):
            self.kept.add(Kept(figures, candidate, self.request.limit, finish))
            self.fastest = min(self.fastest, self.kept.cutoff)

    def go_on(self) -> None:
        """Raise where the time is over, and there is something to take; where there is nothing,
        several times as late, unless what takes least is looked for."""
        patience, has_some = self.request.patience, self.kept.found or self.is_beside
        if patience.is_over() and (has_some or (patience.is_late() and not self.is_last)):
            raise OutOfTime

    @property
    def is_beside(self) -> bool:
        """Whether something was found on other machines."""
        return self.request.fastest < math.inf

    def refuse(self, smallest: Iterable[SmallestFootprint], stages: int) -> None:
        """What layouts need in so many stages."""
        self.refused += [one.in_stages(stages) for one in smallest]

    def pass_over(self, way: StagedWay) -> None:
        """A way that is too large by the sums of its stages, of which no program was made."""
        if self.leanest is None or way.least < self.leanest.least:
            self.leanest = way

    def refusal(self, regions: Regions, captured: Captured) -> InvalidInput | None:
        """Why nothing fits; None: nothing was found to be too large."""
        if self._too_large_for_host:
            return no_room_on_host(self._too_large_for_host)
        ways = [*self.dropped, *([self.leanest.candidate] if self.leanest else [])]
        found = [*self.refused, *too_large(ways, self.request.memory)]
        return nothing(found, self.request, regions, captured) if found else None


def best_first(ways: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Those that fit first; of those that take as long, the one that was weighed first."""
    return tuple(sorted(ways, key=lambda one: (not one.fits, float(f"{one.seconds:.9g}"))))
