"""StageTable: every stage that could be cut out of a program, as tables.

`seconds[i, j]` is of the stage from cut point i to cut point j. A cut lists the cut points at which
its stages start. Entries with i >= j are never read: `offered` leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]  # the candidates of a stage


@dataclass(frozen=True)
class StageTable:
    """Hold the costs of all possible stages in tables over start and end."""

    seconds: NDArray[np.float64]
    empty: Mask  # holds no parameter
    received: NDArray[np.int64]  # bytes, by start alone
    states: NDArray[np.int64]  # bytes of parameters, gradients and optimizer states
    kept: NDArray[np.int64]  # bytes for one micro-batch, until backward
    weight_halves: NDArray[np.int64]  # until the gradients of weights
    remade: NDArray[np.int64]  # in backward, at most

    @property
    def count(self) -> int:
        """Return the number of cut points, the end among them."""
        return len(self.received)

    def offered(self, stages: int, fixed: Mapping[int, int]) -> list[Mask]:
        """Return the candidates of each stage; `fixed` gives the cut points of pinned stages."""
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
        """Return the bytes for one of each of LiveCounts, then those of the states."""
        # Weight halves take the place of the bytes that recomputed regions have freed.
        growth = np.maximum(self.weight_halves - self.kept, 0)
        received = np.broadcast_to(self.received[:, None], self.kept.shape)
        again = self.remade, self.remade + growth
        return self.kept, received, self.weight_halves, *again, self.states

    def bytes(self, *counts: float) -> NDArray:
        """Return the bytes of a stage for `counts` as in LiveCounts, and of its states.

        A sixth count is how often the states are held, 1 by default.
        """
        # Most counts are 0: these terms are skipped.
        terms = [count * size for count, size in zip((*counts, 1), self.by_count) if count]
        return sum(terms[1:], terms[0]) if terms else 0 * self.states

    def fastest(
        self, offered: Sequence[Mask], seconds: Sequence[NDArray] | None = None
    ) -> list[int] | None:
        """Return the cut with the fewest empty stages, then the fastest slowest, then least sent.

        None if the stages cannot follow one another. `seconds`: a table for each, if they differ.
        """
        seconds = seconds or [self.seconds] * len(offered)
        empty, slowest = np.full(self.count, np.inf), np.full(self.count, np.inf)
        empty[0], slowest[0] = 0.0, 0.0
        for mask, time in zip(offered, seconds):
            empties = np.where(mask, empty[:, None] + self.empty, np.inf)
            empty = empties.min(axis=0)
            slow = np.maximum(slowest[:, None], time)
            slowest = np.where(empties == empty, slow, np.inf).min(axis=0)
        quick = [mask & (time <= slowest[-1]) for mask, time in zip(offered, seconds)]
        costs = self.empty * (self.received.sum() + 1) + self.received[:, None]
        return self.least(quick, [costs] * len(offered))

    def least(self, offered: Sequence[Mask], costs: Sequence[NDArray]) -> list[int] | None:
        """Return the cut with the least sum of costs, a table for each stage; None if none fits."""
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
        """Return for each candidate the least sum of costs of a cut with it; inf: there is none."""
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
        """Return the least costs of the first 0, 1, ... stages by the cut point where they end."""
        sums = [np.full(self.count, np.inf)]
        sums[0][0] = 0.0
        for mask, cost in zip(offered, costs):
            sums.append(np.where(mask, sums[-1][:, None] + cost, np.inf).min(axis=0))
        return sums
