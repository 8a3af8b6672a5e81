"""Stretch: where what stands in a short program stands in the one that it stands for.

A program of many equal blocks may be there with a few, of which one stands for several
(`capture/folding.py`). Its line of activations is that of the long one, but for `more` further
copies of one period:

    short   ---- b ==== a ----             b, a: equal blocks before and after
    long    ---- b ==== ==== ==== a ----   more = 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.passes.flow import Flow
from autopar.program.equal_blocks import is_regular
from autopar.strategies.node_info import info

T = TypeVar("T")


class NotAlike(Exception):
    """A rewritten program has not the equal blocks that the captured one has."""


@dataclass(frozen=True)
class Stretch:
    """Of a line of activations: so many stand before the period, in it, and how often it comes
    besides."""

    first: int = 0
    period: int = 0
    more: int = 0

    @classmethod
    def of(cls, flow: Flow) -> Stretch:
        marked = [at for at, node in enumerate(flow.activations) if info(node).count > 1]
        if not marked:
            return NO_STRETCH
        if not is_regular(flow.graph):
            raise NotAlike
        return cls(marked[0], len(marked), info(flow.activations[marked[0]]).count - 1)

    @property
    def end(self) -> int:
        return self.first + self.period

    @property
    def moved(self) -> int:
        """By how much what comes after stands further back."""
        return self.more * self.period

    def long(self, place: int) -> int:
        """Where what stands at a place of the short program stands first."""
        return place if place < self.end else place + self.moved

    def copy(self, place: int) -> int:
        """How many further copies there are up to a place of the long program."""
        return min(max(0, (place - self.first) // self.period), self.more) if self.more else 0

    def short(self, place: int) -> int:
        """Where what stands at a place of the long program stands in the short one."""
        return place - self.copy(place) * self.period

    def stage(self, start: int, end: int) -> tuple[int, int, int]:
        """A stage of the long program as one of the short: where it starts and ends, and how often
        the period comes in it, which is then between blocks that are equal."""
        first, period, moved = self.first, self.period, self.moved
        if not moved or end <= first:
            return start, end, 1
        (at, off), (until, beyond) = divmod(start - first, period), divmod(end - first, period)
        if at >= self.more:
            return start - moved, end - moved, 1
        starts_before, ends_after = start <= first - period, until >= self.more + 2
        if starts_before and ends_after:
            return start, end - moved, self.more + 1
        if starts_before:
            return (start, end, 1) if until < 2 else (start, self.end + period + beyond, until - 1)
        if ends_after:
            return first - period + off, end - moved, self.more - at
        if until - at < 3:
            return first - period + off, first - period + off + end - start, 1
        return first - period + off, self.end + period + beyond, until - at - 2

    def along(self, rows: NDArray) -> NDArray:
        """What is said of each activation of the short program, said of each of the long one."""
        block = rows[self.first : self.end]
        return np.concatenate([rows[: self.end], *[block] * self.more, rows[self.end :]])

    def row(self, values: Sequence[T]) -> list[T]:
        """The same of a list."""
        found = list(values)
        block = found[self.first : self.end]
        return [*found[: self.end], *block * self.more, *found[self.end :]]

    def span(self, first: int, last: int) -> list[tuple[int, int]]:
        """Two places of the short program that belong together, in each copy that starts there."""
        if self.first <= first < self.end:
            return [(first + step, last + step) for step in self._steps]
        return [(self.long(first), self.long(last))]

    @property
    def _steps(self) -> Sequence[int]:
        return range(0, self.moved + 1, self.period) if self.more else (0,)

    def readers(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """The places where something is read, in ascending order, of each copy of it."""
        if not self.more or places[-1] < self.first:
            return [tuple(places)]
        steps = self._steps
        if self.first <= places[0] < self.end:
            return [tuple(place + step for place in places) for step in steps]
        there, found = set(places), set[int]()
        for place in places:
            is_inside = self.first <= place < self.end
            # What the blocks beside read there, too, is read by all.
            is_of_all = is_inside and {place - self.period, place + self.period} <= there
            found.update(self.long(place) + step for step in (steps if is_of_all else (0,)))
        return [tuple(sorted(found))]


NO_STRETCH = Stretch()
