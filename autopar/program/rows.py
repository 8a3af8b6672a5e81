"""Rows: equal blocks, one after another, among the calls of a program.

    for row in rows(calls, facts, held):
        row.start, row.period, row.count   # blocks of `period` calls, from the place `start` on

Two calls are equal when what the caller says of them is, and where the calls that they read, and
those that read them, stand from there. Parameters are as those who read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import fx

LEAST_BLOCKS = 4
Describe = Callable[[fx.Node], Hashable]


@dataclass(frozen=True)
class Row:
    """Equal blocks, one after another."""

    calls: Sequence[fx.Node]  # of the program, in order
    start: int  # the place of the first call of the first block
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.period

    @property
    def inside(self) -> Sequence[fx.Node]:
        """Return the calls of all blocks."""
        return self.calls[self.start : self.end]


def rows(calls: Sequence[fx.Node], facts: Describe, held: Describe) -> Iterator[Row]:
    """Yield the longest row of a program, then the longest before and after it, and so on.

    `facts`: what a call is, wherever it stands; `held`: what is known of what is given.
    """
    comparison = _Comparison(calls, facts, held)
    spans = [(0, len(calls))]
    while spans:
        begin, end = spans.pop()
        if (row := comparison.longest_row(begin, end)) is not None:
            yield row
            spans += [(begin, row.start), (row.end, end)]


class _Comparison:
    """Says which calls of a program stand to others in the same way."""

    def __init__(self, calls: Sequence[fx.Node], facts: Describe, held: Describe) -> None:
        self._calls, self._held = calls, held
        self._place = {node: at for at, node in enumerate(calls)}
        known: dict[Hashable, int] = {}
        kinds = (known.setdefault(facts(node), len(known)) for node in calls)
        self._numbers = np.fromiter(kinds, int, len(calls))

    def longest_row(self, begin: int, end: int) -> Row | None:
        """Return the longest row between two places; None: nothing is repeated there."""
        numbers, calls = self._numbers[begin:end], self._calls
        period = _period(numbers)
        if not period:
            return None
        same = numbers[period:] == numbers[:-period]
        for at in (begin + np.flatnonzero(same)).tolist():
            same[at - begin] = self.are_alike(calls[at], calls[at + period])
        start, length = _longest(same)
        count = length // period + 1
        return Row(calls, begin + start, period, count) if count >= LEAST_BLOCKS else None

    def are_alike(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two calls of one kind read, and are read by, the same calls from there."""
        if self._readers(one, one) != self._readers(other, other):
            return False
        read, others = one.all_input_nodes, other.all_input_nodes
        return len(read) == len(others) and all(
            self._is_same(value, one, another, other)
            for value, another in zip(read, others)
            if value is not another
        )

    def _is_same(self, value: fx.Node, one: fx.Node, another: fx.Node, other: fx.Node) -> bool:
        if value.op == "call_function":
            back = self._place[one] - self._place[value]
            return self._place.get(another) == self._place[other] - back
        if another.op != "placeholder" or self._held(value) != self._held(another):
            return False
        return self._readers(value, one) == self._readers(another, other)

    def _readers(self, value: fx.Node, node: fx.Node) -> list[int]:
        """Return how far after a call those stand that read a value; the end of all is far."""
        at = self._place[node]
        return [self._place.get(user, 2 * len(self._place)) - at for user in value.users]


def _period(numbers: np.ndarray) -> int:
    """Return after how many calls most kinds come again that keep one distance; 0: none does."""
    order = np.argsort(numbers, kind="stable")
    gaps, is_next = np.diff(order), np.diff(numbers[order]) == 0
    covered: dict[int, int] = {}
    kinds = zip(numbers[order][1:].tolist(), gaps.tolist(), is_next.tolist())
    for _, calls in groupby(kinds, key=lambda call: call[0]):
        distances = sorted(gap for _, gap, is_same in calls if is_same)
        if len(distances) >= LEAST_BLOCKS - 1:
            middle = distances[len(distances) // 2]
            if distances.count(middle) * 4 >= len(distances) * 3:
                covered[middle] = covered.get(middle, 0) + len(distances)
    return max(covered, key=lambda gap: covered[gap], default=0)


def _longest(same: np.ndarray) -> tuple[int, int]:
    """Return where the longest row of true ones starts, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts):
        return 0, 0
    at = int(lengths.argmax())
    return int(starts[at]), int(lengths[at])
