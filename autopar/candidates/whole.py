"""Whole: the program that a short one stands for, and ways to run it, found on the short one.

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
from autopar.capture.folding import Folded
from autopar.capture.regions import label_of
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.pipeline.stages.stretch import NotAlike
from autopar.recompute import Recompute, summary

_CLOSE = 1e-6  # relative


class Whole:
    """A whole program; it is cut into micro-batches when these are asked for."""

    def __init__(self, short: Folded, brief: Folded, request: Request) -> None:
        """`brief`: with as few blocks as layouts are searched for on."""
        self.short, self.brief, self._memory = short, brief, request.memory
        self._recomputation = request.recompute
        self.regions = Regions(short.whole, self._recomputation)
        self._names = (*self.regions.fixed, *self.regions.free)
        self._in_runs = cache(self._program_in_runs)
        self._shorts = dict[int, Folded]()  # by the programs that were made in runs
        self._batches = cache(partial(cut_batch, short.whole))
        self._cut_brief = cache(partial(cut_batch, brief.captured))

    def program(self, batches: Microbatches | None) -> tuple[Captured, Microbatches | None]:
        """Return the whole program, cut into as many micro-batches, and these."""
        if batches is None:
            return self.short.whole, None
        cut = self._batches(batches.count)
        return cut.captured, cut

    def brief_program(self, batches: Microbatches | None) -> Captured:
        """Return the brief program, in as many micro-batches."""
        return self.brief.captured if batches is None else self._cut_brief(batches.count).captured

    def recomputed(self, decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
        """Return the decisions about regions of the whole program, from those of the short one."""
        return recomputed(decided, self.short, self._names)

    def of(self, candidate: Candidate, names: Mapping[str, str] | None = None) -> Candidate:
        """Return the whole program with the layouts, states, stages and recomputation of a
        candidate. `names`: other names of axes."""
        short = self._shorts.get(id(candidate.captured), self.short)
        if short is self.short and not candidate.captured.is_folded:
            return candidate
        decided = recomputed(candidate.decisions.recompute, short, self._names)
        return lengthened(candidate, short, *self.program(candidate.batches), decided, names)

    def mixed(self, candidate: Candidate, mix: Mix) -> Candidate:
        """Return a candidate whose regions are treated as in a mix. A block stands for others in
        each run of blocks that are treated alike."""
        decided = self.regions.fixed | mix.of(self.regions.free)
        alike = groupby(tuple(map(decided.get, names)) for names in self._blocks)
        count = None if candidate.batches is None else candidate.batches.count
        program, batches = self._in_runs(tuple(len([*run]) for _, run in alike), count)
        return lengthened(candidate, self.short, program, batches, decided)

    def with_all_regions(self, figures: Alternative, candidate: Candidate) -> Alternative:
        """Return the figures of a candidate with all regions that run again."""
        decided = candidate.decisions.recompute
        if not candidate.captured.is_folded or id(candidate.captured) in self._shorts:
            return figures
        regions = {name: decided[twin] for name, twin in self._twins.items() if twin in decided}
        return replace(figures, recompute=summary(regions))

    @cached_property
    def _twins(self) -> dict[str, str]:
        """Return by region of the whole program the one of the short program that stands for it."""
        regions = Regions(self.short.captured, self._recomputation)
        names = (*regions.fixed, *regions.free)
        return recomputed(dict(zip(names, names)), self.short, self._names)

    @cached_property
    def _blocks(self) -> list[list[str]]:
        """Return the regions in each of the equal blocks."""
        calls = {node.name: node for node in self.short.whole.operators}
        blocks = []
        for names in self.short.blocks:
            inside = (calls[name] for name in names if name in calls)
            labels = dict.fromkeys(label_of(call, self._names) for call in inside)
            blocks.append([label for label in labels if label])
        return blocks

    def _program_in_runs(
        self, lengths: tuple[int, ...], microbatches: int | None
    ) -> tuple[Captured, Microbatches | None]:
        short = self.short.in_runs(lengths)
        batches = None if microbatches is None else cut_batch(short.captured, microbatches)
        program = short.captured if batches is None else batches.captured
        self._shorts[id(program)] = short
        return program, batches

    def confirmed(self, candidate: Candidate, names: Mapping[str, str]) -> Candidate:
        """Return the whole program with the decisions of a candidate and other names of axes. Raise
        `NotAlike` if it takes other seconds than the short one, or does not fit."""
        whole = self.of(candidate, names)
        is_as_fast = isclose(candidate.seconds, whole.seconds, rel_tol=_CLOSE)
        if not is_as_fast or not whole.fits(self._memory):
            raise NotAlike
        return whole
