"""PlaceMap: where the nodes of a folded program stand in the program with all blocks.

    place_map = PlaceMap.of(nodes)   # in the order of a program: its activations, or its calls
    place_map.count                  # how many the long row has
    place_map.shown[place]           # where in `nodes` that stands
    place_map.stage(start, end)      # a part of the long row as one of the short, with its counts

Some nodes stand for several blocks, between blocks b and a that are equal to them:

    short row  ---- b ==== a ---- b **** a ----
    long row   ---- b ==== ==== ==== a ---- b **** **** a ----
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.strategies.node_info import info

T = TypeVar("T")


@dataclass(frozen=True)
class RepeatedSpan:
    """Describes a block of the short row that stands for `count` blocks of the long one."""

    block: tuple[fx.Graph, int]  # its graph, and its number
    shown: int  # the place of its first node in the short row
    first: int  # the place of that in the long row
    period: int  # how many nodes it has
    count: int

    @property
    def more(self) -> int:
        """Return how many nodes it stands for besides its own."""
        return (self.count - 1) * self.period

    def stage(self, start: int, end: int) -> tuple[int, int, int]:
        """Return the start and end of a stage where this block comes once, and for how many it
        stands in the stage, which has an equal block before and after it.

        Before this block the places are those of the long row, and behind it, too.
        """
        first, period, more = self.first, self.period, self.count - 1
        if end <= first:
            return start, end, 1
        (at, off), (until, beyond) = divmod(start - first, period), divmod(end - first, period)
        if at >= more:
            return start - self.more, end - self.more, 1
        starts_before, ends_after = start <= first - period, until >= more + 2
        if starts_before and ends_after:
            return start, end - self.more, self.count
        if starts_before:
            behind = first + 2 * period + beyond
            return (start, end, 1) if until < 2 else (start, behind, until - 1)
        if ends_after:
            return first - period + off, end - self.more, more - at
        if until - at < 3:
            return first - period + off, first - period + off + end - start, 1
        return first - period + off, first + 2 * period + beyond, until - at - 2


class ShownStage(NamedTuple):
    """A part of the long row as one of the short row."""

    start: int
    end: int
    counts: tuple[int, ...]  # for how many blocks each run stands in it


@dataclass(frozen=True)
class PlaceMap:
    """Maps places of the long row to those of the short one, and back."""

    length: int  # of the short row
    runs: tuple[RepeatedSpan, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> PlaceMap:
        """Return the map of some nodes in the order of their program."""
        runs, at, more = list[RepeatedSpan](), 0, 0
        for block, row in groupby(nodes, key=lambda node: info(node).repeated_block):
            inside = [*row]
            if block is not None:
                runs.append(RepeatedSpan(block, at, at + more, len(inside), info(inside[0]).count))
                more += runs[-1].more
            at += len(inside)
        return cls(at, tuple(runs))

    @property
    def count(self) -> int:
        """Return how many places the long row has."""
        return self.length + sum(run.more for run in self.runs)

    @cached_property
    def shown(self) -> NDArray[np.int64]:
        """Return the place in the short row by place of the long one, the end among them."""
        pieces, at = list[NDArray](), 0
        for run in self.runs:
            pieces.append(np.arange(at, run.shown))
            pieces += [np.arange(run.shown, run.shown + run.period)] * run.count
            at = run.shown + run.period
        return np.concatenate([*pieces, np.arange(at, self.length + 1)])

    @cached_property
    def later(self) -> NDArray[np.int64]:
        """Return by place of the long row how many blocks it stands after the one that is shown."""
        later = np.zeros(self.count + 1, np.int64)
        for run in self.runs:
            later[run.first : run.first + run.count * run.period] = np.repeat(
                np.arange(run.count), run.period
            )
        return later

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """Return the first place in the long row by place of the short one."""
        return np.searchsorted(np.maximum.accumulate(self.shown), np.arange(self.length + 1))

    def first(self, place: int) -> int:
        """Return where what stands at a place of the short row stands first in the long one."""
        return int(self._first[place])

    def places(self, place: int) -> range:
        """Return all places in the long row of what stands at a place of the short one."""
        first, run = self.first(place), self._run_at(place)
        if run is None:
            return range(first, first + 1)
        return range(first, first + run.more + 1, run.period)

    def _run_at(self, place: int) -> RepeatedSpan | None:
        inside = (run for run in self.runs if run.shown <= place < run.shown + run.period)
        return next(inside, None)

    def repeat_values(self, values: Sequence[T]) -> list[T]:
        """Return what is known of each place of the long row, from that of the short one."""
        return [values[place] for place in self.shown[:-1].tolist()]

    def spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return for two places of the short row that belong together those in the long one, of
        each block in which the first is."""
        places = self.places(first)
        if len(places) == 1:
            return [(places[0], self.first(last))]
        return [(place, place + last - first) for place in places]

    def readers(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the places of the long row at which something is read, for each block that has its
        own, from those in the short row in ascending order."""
        if (own := self.places(places[0])) and len(own) > 1:
            return [tuple(place - places[0] + at for place in places) for at in own]
        there, read_at = set(places), set[int]()
        for place in places:
            run, every = self._run_at(place), self.places(place)
            # What the blocks beside read there, too, is read by all.
            is_of_all = run is not None and {place - run.period, place + run.period} <= there
            read_at.update(every if is_of_all else every[:1])
        return [tuple(sorted(read_at))]

    def stage(self, start: int, end: int) -> ShownStage:
        """Return a stage of the long row as one of the short row."""
        counts = list[int]()
        for run in reversed(self.runs):
            start, end, count = run.stage(start, end)
            counts.append(count)
        return ShownStage(start, end, tuple(reversed(counts)))

    def set_counts(self, nodes: Iterable[fx.Node], counts: Sequence[int]) -> None:
        """Let the nodes of each run stand for another number of blocks."""
        count_of = {run.block: count for run, count in zip(self.runs, counts)}
        for node in nodes:
            if (block := info(node).repeated_block) is not None:
                place = info(node).block
                info(node).block = place and replace(place, count=count_of.get(block, place.count))


def repeated_blocks(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes of each block that stands for several, in order."""
    blocks: dict[tuple[fx.Graph, int], list[fx.Node]] = {}
    for node in nodes:
        if (block := info(node).repeated_block) is not None:
            blocks.setdefault(block, []).append(node)
    return [*blocks.values()]
