"""Spans: bytes that a stage holds if certain activations belong to it.

>>> spans = Spans()
>>> spans.all_of((2, 5), 10.0)     # made at 2, kept from 5 on
>>> spans.any_of((1, 4, 7), 3.0)   # a parameter that is read three times, held once
>>> spans.bytes(0, 5), spans.bytes(2, 6)
(3, 13)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.program.place_map import PlaceMap


class Spans:
    """Collect tensors with their positions, then sum the bytes that a stage holds."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, float]] = []  # first position, last position, bytes

    def all_of(self, positions: Iterable[int], size: float) -> None:
        """Add bytes held by a stage that all of `positions` belong to."""
        ordered = sorted(positions)
        self._rows.append((ordered[0], ordered[-1], size))

    def any_of(self, positions: Iterable[int], size: float) -> None:
        """Add bytes held, once, by every stage that some of `positions` belong to."""
        ordered = sorted(set(positions))
        self._rows += [(position, position, size) for position in ordered]
        # A stage with k of them has k - 1 pairs of neighbours.
        self._rows += [(position, after, -size) for position, after in pairwise(ordered)]

    def repeated(self, place_map: PlaceMap) -> Spans:
        """Return the spans of the long row, from those of the short one."""
        if not place_map.runs:
            return self
        spans = Spans()
        for first, last, size in self._rows:
            spans._rows += [(*ends, size) for ends in place_map.spans(first, last)]
        return spans

    def bytes(self, start: int, end: int) -> int:
        """Return the bytes that a stage holds from position `start` to before `end`."""
        first, last, sizes = self._columns
        return round(float(sizes[(first >= start) & (last < end)].sum()))

    def table(self, bounds: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes by start and end of a stage, both from `bounds`."""
        first, last, sizes = self._columns
        row = np.searchsorted(bounds, first, "right") - 1  # the last bound not behind it
        column = np.searchsorted(bounds, last, "right")  # the first bound behind it
        inside = (row >= 0) & (column < len(bounds))
        table = np.zeros((len(bounds), len(bounds)))
        np.add.at(table, (row[inside], column[inside]), sizes[inside])
        table = table[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        return np.triu(np.rint(table).astype(np.int64), 1)

    @cached_property
    def _columns(self) -> tuple[NDArray, ...]:
        first, last, sizes = zip(*self._rows) if self._rows else ((), (), ())
        return np.array(first, np.int64), np.array(last, np.int64), np.array(sizes, np.float64)
