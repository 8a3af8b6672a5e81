"""HeldParameters: which parameters and buffers some stages hold, and how many of each kind.

held = HeldParameters(costs)
held.by([(0, 40), (200, 240)])      # the nodes that these two stages hold, with their counts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from autopar.pipeline.stages.stage_tables import StageCosts


class HeldParameters:
    """Count the parameters and buffers of stages, in a program that may stand for a longer one."""

    def __init__(self, costs: StageCosts) -> None:
        self._nodes = list(costs.flow.held_at)
        rows = [
            (number, places)
            for number, node in enumerate(self._nodes)
            for places in costs.flow.place_map.readers(costs.flow.held_at[node])
        ]
        self._node_of_copy = np.array([number for number, _ in rows], np.int64)
        # Of each reader, the copy of a node that it reads, and its place.
        self._copy = np.array([at for at, (_, row) in enumerate(rows) for _ in row], np.int64)
        self._place = np.array([place for _, row in rows for place in row], np.int64)
        self._cache: dict[tuple[tuple[int, int], ...], dict[fx.Node, int]] = {}

    def by(self, bounds: Sequence[tuple[int, int]]) -> dict[fx.Node, int]:
        """Return how many of each node the stages between these cut points hold together."""
        key = tuple(bounds)
        if key not in self._cache:
            is_inside = np.zeros(len(self._place), bool)
            for start, end in bounds:
                is_inside |= (self._place >= start) & (self._place < end)
            is_held = np.bincount(self._copy[is_inside], minlength=len(self._node_of_copy)) > 0
            nodes = self._node_of_copy[is_held]
            counts = np.bincount(nodes, minlength=len(self._nodes)).tolist()
            self._cache[key] = {node: count for node, count in zip(self._nodes, counts) if count}
        return self._cache[key]
