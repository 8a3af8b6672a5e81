"""StageTable: every stage that could be cut out of a program, as tables.

`seconds[i, j]` is of the stage from cut point i to cut point j. A cut is the cut points where its
stages start, and the end. What the tables say of i >= j is not read: `offered` leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]  # which of them a stage may be


@dataclass(frozen=True)
class StageTable:
    """Tables over start and end."""

    seconds: NDArray[np.float64]
    empty: Mask  # holds no parameter
    received: NDArray[np.int64]  # bytes, by start alone
    states: NDArray[np.int64]  # bytes
    kept: NDArray[np.int64]  # bytes for one micro-batch, until backward
    weight_halves: NDArray[np.int64]  # until the gradients of weights
    remade: NDArray[np.int64]  # in backward, at most

    @property
    def count(self) -> int:
        """Of cut points, the end among them."""
        return len(self.received)

    def offered(self, stages: int, fixed: Mapping[int, int]) -> list[Mask]:
        """What each stage may be; `fixed` says by stage at which cut point it starts."""
        start, end = np.indices(self.seconds.shape)
        fixed = {**fixed, 0: 0, stages: self.count - 1}
        rows = []
        for stage in range(stages):
            row = (start < end) & ((start == 0) == (stage == 0))
            row &= (end == self.count - 1) == (stage == stages - 1)
            row &= start == fixed.get(stage, start)
            rows.append(row & (end == fixed.get(stage + 1, end)))
        return rows

    @cached_property
    def by_count(self) -> tuple[NDArray, ...]:
        """Bytes for one of each of LiveCounts, then the states."""
        # As regions go, what gradients of weights are made of takes the place of what they kept.
        growth = np.maximum(self.weight_halves - self.kept, 0)
        received = np.broadcast_to(self.received[:, None], self.kept.shape)
        again = self.remade, self.remade + growth
        return self.kept, received, self.weight_halves, *again, self.states

    def bytes(self, *counts: float) -> NDArray:
        """What a stage keeps of so many micro-batches, as in LiveCounts, and its states: once, if
        it is not said how often."""
        # Of most there is none: nothing is added for these.
        terms = [count * size for count, size in zip((*counts, 1), self.by_count) if count]
        return sum(terms[1:], terms[0]) if terms else 0 * self.states

    def fastest(
        self, offered: Sequence[Mask], seconds: Sequence[NDArray] | None = None
    ) -> list[int] | None:
        """The cut with fewest empty stages; of these with the fastest slowest; that sends least.

        None if the stages cannot follow one another. `seconds`: of each stage, if they differ.
        """
        seconds = seconds or [self.seconds] * len(offered)
        empty, slowest = np.full(self.count, np.inf), np.full(self.count, np.inf)
        empty[0], slowest[0] = 0.0, 0.0
        for mask, own in zip(offered, seconds):
            empties = np.where(mask, empty[:, None] + self.empty, np.inf)
            empty = empties.min(axis=0)
            slow = np.maximum(slowest[:, None], own)
            slowest = np.where(empties == empty, slow, np.inf).min(axis=0)
        quick = [mask & (own <= slowest[-1]) for mask, own in zip(offered, seconds)]
        costs = self.empty * (self.received.sum() + 1) + self.received[:, None]
        return self.least(quick, [costs] * len(offered))

    def least(self, offered: Sequence[Mask], costs: Sequence[NDArray]) -> list[int] | None:
        """The cut with the least sum of its stages' costs, each from its own table."""
        reached, point = self._sums(offered, costs), self.count - 1
        if not np.isfinite(reached[-1][point]):
            return None
        points: list[int] = []
        for before, mask, cost in reversed(list(zip(reached, offered, costs))):
            value = before + np.where(mask[:, point], cost[:, point], np.inf)
            point = int(value.argmin())
            points.insert(0, point)
        return points

    def through(self, offered: Sequence[Mask], costs: Sequence[NDArray]) -> list[NDArray]:
        """For all that stages may be, the least sum of costs of a cut that has it; inf: none."""
        before = self._sums(offered, costs)
        turned = [
            [table.T[::-1, ::-1] for table in reversed(tables)] for tables in (offered, costs)
        ]
        after = [sums[::-1] for sums in reversed(self._sums(*turned))]
        return [
            np.where(mask, reached[:, None] + cost + left, np.inf)
            for reached, mask, cost, left in zip(before, offered, costs, after[1:])
        ]

    def _sums(self, offered: Sequence[Mask], costs: Sequence[NDArray]) -> list[NDArray]:
        """The least sum of the first stages' costs by where they end: of none, of one, ..."""
        sums = [np.full(self.count, np.inf)]
        sums[0][0] = 0.0
        for mask, cost in zip(offered, costs):
            sums.append(np.where(mask, sums[-1][:, None] + cost, np.inf).min(axis=0))
        return sums
