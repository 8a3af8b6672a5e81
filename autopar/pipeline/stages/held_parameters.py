"""Holding: which parameters and buffers some stages of a program hold, and how many of each kind.

held = Holding(costs)
held.by([(0, 40), (200, 240)])      # of these stages together: nodes, each with a number
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from autopar.pipeline.stages.stage_tables import StageCosts


class Holding:
    """Of a program that may stand for a longer one."""

    def __init__(self, costs: StageCosts) -> None:
        self._nodes = list(costs.flow.held_at)
        rows = [
            (number, places)
            for number, node in enumerate(self._nodes)
            for places in costs.stretch.readers(costs.flow.held_at[node])
        ]
        self._node = np.array([number for number, _ in rows], np.int64)
        self._row = np.array([at for at, (_, row) in enumerate(rows) for _ in row], np.int64)
        self._place = np.array([place for _, row in rows for place in row], np.int64)
        self._known: dict[tuple[tuple[int, int], ...], dict[fx.Node, int]] = {}

    def by(self, bounds: Sequence[tuple[int, int]]) -> dict[fx.Node, int]:
        """What stages with these first and last points hold, each thing once."""
        key = tuple(bounds)
        if key not in self._known:
            near = np.zeros(len(self._place), bool)
            for start, end in bounds:
                near |= (self._place >= start) & (self._place < end)
            there = np.bincount(self._row[near], minlength=len(self._node)) > 0
            counts = np.bincount(self._node[there], minlength=len(self._nodes)).tolist()
            self._known[key] = {node: count for node, count in zip(self._nodes, counts) if count}
        return self._known[key]
