"""Whole: the program that a folded one stands for, and programs that are folded otherwise.

whole = Whole(short, request)
whole.mixed(candidate, mix)    # of a program with a block for each run of the mix
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby

from torch import fx

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import RecomputeAssignment
from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.candidates.unfolded import unfolded_regions, with_program
from autopar.capture.captured import Captured
from autopar.capture.folding import fold_in_runs, worth_folding
from autopar.capture.regions import label_of
from autopar.passes.microbatches import Microbatches, cut_batch
from autopar.recompute import Recompute, summary
from autopar.strategies.node_info import info


class Whole:
    """A whole program; it is cut into micro-batches when these are asked for."""

    def __init__(self, short: Captured, request: Request) -> None:
        assert short.unfolded is not None
        self.short, self.whole = short, short.unfolded
        self._recomputation = request.recompute
        self._in_runs = cache(self._program_in_runs)
        self._batches = cache(partial(cut_batch, self.whole))

    @cached_property
    def regions(self) -> Regions:
        """Return the regions of the whole program."""
        return Regions(self.whole, self._recomputation)

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.regions.fixed, *self.regions.free)

    def program(self, batches: Microbatches | None) -> tuple[Captured, Microbatches | None]:
        """Return the whole program, cut into as many micro-batches, and these."""
        if batches is None:
            return self.whole, None
        cut = self._batches(batches.count)
        return cut.captured, cut

    def recomputed(self, decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
        """Return the decisions about regions of the whole program, from those of the short one."""
        return unfolded_regions(decided, self.short, self._names)

    def mixed(self, candidate: Candidate, mix: RecomputeAssignment) -> Candidate:
        """Return a candidate whose regions are treated as in a mix. A block stands for others in
        each run of blocks that are treated alike."""
        decided = self.regions.fixed | mix.for_regions(self.regions.free)
        counts = tuple(
            tuple(len([*run]) for _, run in groupby(tuple(map(decided.get, n)) for n in blocks))
            for blocks in self._blocks
        )
        count = None if candidate.batches is None else candidate.batches.count
        program, batches = self._in_runs(counts, count)
        return with_program(candidate, program, batches, decided)

    def with_all_regions(self, figures: Alternative, candidate: Candidate) -> Alternative:
        """Return the figures of a candidate with all regions that run again."""
        decided, program = candidate.decisions.recompute, candidate.captured
        if not program.is_folded or not decided:
            return figures
        if program.program is self.whole.program:
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
    def _blocks(self) -> list[list[list[str]]]:
        """Return the regions in each of the equal blocks, by segment that is folded."""
        assert self.whole.program is not None
        graphs = [segment.graph for segment in worth_folding(self.whole.program)]
        labels: dict[fx.Graph, dict[int, dict[str, None]]] = {graph: {} for graph in graphs}
        for call in self.whole.operators:
            place, label = info(call).block, label_of(call, self._names)
            if place is not None and place.blocks.graph in labels:
                of_block = labels[place.blocks.graph].setdefault(place.number, {})
                of_block |= {label: None} if label else {}
        return [[[*names] for names in blocks.values()] for blocks in labels.values()]

    def _program_in_runs(
        self, counts: tuple[tuple[int, ...], ...], microbatches: int | None
    ) -> tuple[Captured, Microbatches | None]:
        program = fold_in_runs(self.whole, counts)
        batches = None if microbatches is None else cut_batch(program, microbatches)
        return program if batches is None else batches.captured, batches
