"""Whole: the program that a short one stands for, and ways to run it that were found on that.

whole = Whole(short, brief, request)   # `brief`: the shortest, which layouts are searched for on
whole.of(candidate)                    # the same way, of the whole program
whole.mixed(candidate, mix)            # of a program with a block for each run of the mix
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby
from math import isclose

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.candidates.lengthened import lengthened, recomputed
from autopar.candidates.mixed_problem import Mix
from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.capture.regions import label_of
from autopar.capture.shortened import Shortened
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.pipeline.stages.stretch import NotAlike
from autopar.recompute import Recompute, summary

_CLOSE = 1e-6  # relative


class Whole:
    """A whole program; it is cut into micro-batches when these are asked for."""

    def __init__(self, short: Shortened, brief: Shortened, request: Request) -> None:
        """`brief`: with as few blocks as layouts are searched for on."""
        self.short, self.brief, self._memory = short, brief, request.memory
        self._asked = request.recompute
        self.regions = Regions(short.whole, self._asked)
        self._names = (*self.regions.fixed, *self.regions.free)
        self._in_runs = cache(self._made_in_runs)
        self._shorts = dict[int, Shortened]()  # by the programs that were made in runs
        self._batches = cache(partial(cut_batch, short.whole))
        self._briefly = cache(partial(cut_batch, brief.captured))

    def program(self, batches: Microbatches | None) -> tuple[Captured, Microbatches | None]:
        """In as many micro-batches as the short one."""
        if batches is None:
            return self.short.whole, None
        made = self._batches(batches.count)
        return made.captured, made

    def briefly(self, batches: Microbatches | None) -> Captured:
        """The brief program, in as many micro-batches."""
        return self.brief.captured if batches is None else self._briefly(batches.count).captured

    def recomputed(self, decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
        """What is decided of regions of the short program, of those of the whole one."""
        return recomputed(decided, self.short, self._names)

    def of(self, found: Candidate, names: Mapping[str, str] | None = None) -> Candidate:
        """The same layouts, states, stages and recomputation; `names`: other names of axes."""
        short = self._shorts.get(id(found.captured), self.short)
        if short is self.short and found.captured.times == 1:
            return found
        decided = recomputed(found.decisions.recompute, short, self._names)
        return lengthened(found, short, *self.program(found.batches), decided, names)

    def mixed(self, found: Candidate, mix: Mix) -> Candidate:
        """The same layouts where regions are treated as in a mix: with a block that stands for
        others in each run of those that are treated alike."""
        decided = self.regions.fixed | mix.of(self.regions.free)
        alike = groupby(tuple(map(decided.get, names)) for names in self._blocks)
        count = None if found.batches is None else found.batches.count
        program, batches = self._in_runs(tuple(len([*run]) for _, run in alike), count)
        return lengthened(found, self.short, program, batches, decided)

    def told(self, figures: Alternative, found: Candidate) -> Alternative:
        """The figures of what was found, with all regions that run again."""
        decided = found.decisions.recompute
        if found.captured.times == 1 or id(found.captured) in self._shorts:
            return figures
        every = {name: decided[own] for name, own in self._stands_for.items() if own in decided}
        return replace(figures, recompute=summary(every))

    @cached_property
    def _stands_for(self) -> dict[str, str]:
        """Of each region, that of the short program which stands for it."""
        own = Regions(self.short.captured, self._asked)
        names = (*own.fixed, *own.free)
        return recomputed(dict(zip(names, names)), self.short, self._names)

    @cached_property
    def _blocks(self) -> list[list[str]]:
        """The regions in each of the equal blocks."""
        row = self.short.row
        found = []
        for first in range(row.start, row.end, row.period):
            calls = row.calls[first : first + row.period]
            labels = dict.fromkeys(label_of(call, self._names) for call in calls)
            found.append([label for label in labels if label])
        return found

    def _made_in_runs(
        self, counts: tuple[int, ...], parts: int | None
    ) -> tuple[Captured, Microbatches | None]:
        if (short := self.short.in_runs(counts)) is None:
            return self.short.whole, None if parts is None else self._batches(parts)
        batches = None if parts is None else cut_batch(short.captured, parts)
        program = short.captured if batches is None else batches.captured
        self._shorts[id(program)] = short
        return program, batches

    def same(self, found: Candidate, names: Mapping[str, str]) -> Candidate:
        """The same with these names of axes, which must take what it is said to take on the short
        program."""
        made = self.of(found, names)
        if not isclose(found.seconds, made.seconds, rel_tol=_CLOSE) or not made.fits(self._memory):
            raise NotAlike
        return made
