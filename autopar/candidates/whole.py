"""Whole: the program that a folded one stands for, and programs that are folded otherwise.

whole = Whole(short, request)
whole.mixed(candidate, mix)    # of a program with a block for each run of the mix
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import Mix
from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.candidates.unfolded import unfolded_regions, with_program
from autopar.capture.captured import Captured, Folding
from autopar.capture.folding import in_runs
from autopar.capture.regions import label_of
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.recompute import Recompute, summary


class Whole:
    """A whole program; it is cut into micro-batches when these are asked for."""

    def __init__(self, short: Captured, request: Request) -> None:
        assert short.folding is not None
        self.short = short
        self.folding: Folding = short.folding
        self._recomputation = request.recompute
        self._in_runs = cache(self._program_in_runs)
        self._batches = cache(partial(cut_batch, self.folding.whole))

    @cached_property
    def regions(self) -> Regions:
        """Return the regions of the whole program."""
        return Regions(self.folding.whole, self._recomputation)

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.regions.fixed, *self.regions.free)

    def program(self, batches: Microbatches | None) -> tuple[Captured, Microbatches | None]:
        """Return the whole program, cut into as many micro-batches, and these."""
        if batches is None:
            return self.folding.whole, None
        cut = self._batches(batches.count)
        return cut.captured, cut

    def recomputed(self, decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
        """Return the decisions about regions of the whole program, from those of the short one."""
        return unfolded_regions(decided, self.short, self._names)

    def mixed(self, candidate: Candidate, mix: Mix) -> Candidate:
        """Return a candidate whose regions are treated as in a mix. A block stands for others in
        each run of blocks that are treated alike."""
        decided = self.regions.fixed | mix.of(self.regions.free)
        alike = groupby(tuple(map(decided.get, names)) for names in self._blocks)
        count = None if candidate.batches is None else candidate.batches.count
        program, batches = self._in_runs(tuple(len([*run]) for _, run in alike), count)
        return with_program(candidate, self.folding, program, batches, decided)

    def with_all_regions(self, figures: Alternative, candidate: Candidate) -> Alternative:
        """Return the figures of a candidate with all regions that run again."""
        decided, program = candidate.decisions.recompute, candidate.captured
        if not program.is_folded or not decided:
            return figures
        if program.folding is self.folding:
            regions = {name: decided[twin] for name, twin in self._twins.items() if twin in decided}
        else:
            regions = unfolded_regions(decided, program, self._names)
        return replace(figures, recompute=summary(regions))

    @cached_property
    def _twins(self) -> dict[str, str]:
        """Return by region of the whole program the one of the short program that stands for it."""
        regions = Regions(self.short, self._recomputation)
        names = (*regions.fixed, *regions.free)
        return unfolded_regions(dict(zip(names, names)), self.short, self._names)

    @cached_property
    def _blocks(self) -> list[list[str]]:
        """Return the regions in each of the equal blocks."""
        calls = {node.name: node for node in self.folding.whole.operators}
        blocks = []
        for names in self.folding.blocks:
            inside = (calls[name] for name in names if name in calls)
            labels = dict.fromkeys(label_of(call, self._names) for call in inside)
            blocks.append([label for label in labels if label])
        return blocks

    def _program_in_runs(
        self, lengths: tuple[int, ...], microbatches: int | None
    ) -> tuple[Captured, Microbatches | None]:
        program = in_runs(self.folding, lengths)
        batches = None if microbatches is None else cut_batch(program, microbatches)
        return program if batches is None else batches.captured, batches
