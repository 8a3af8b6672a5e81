"""Overlapped work: what readers of a value compute while the value, or its gradient, is moved.

Movements of a parameter overlap with its readers' forward and backward. The movement that brings
back the gradient of an activation overlaps with gradients of weights, if linears alone read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.deferred_reductions import reads_as_linear
from autopar.layout import Placement
from autopar.search.candidates import Candidates
from autopar.search.reshard_table import Placements
from autopar.strategies.node_info import info

Array = NDArray[np.float64]


class ReaderWork(NamedTuple):
    """Hold a reader of a value with all strategies that it can run under."""

    reader: fx.Node
    offered: Candidates
    position: int  # of the value among its inputs

    def seconds(self, *, is_deferred: bool) -> tuple[Array, Array]:
        """Return the seconds that overlap under each strategy, forward and backward."""
        if is_deferred:
            return self.offered.forward, self.offered.backward
        return np.zeros(len(self.offered.strategies)), self.offered.weight_seconds

    def by_state(self, states: Placements, *, is_deferred: bool) -> tuple[Array, Array]:
        """Return the seconds for each state: the most of the strategies that want the value so."""
        wants, seconds = self.offered.inputs[self.position], self.seconds(is_deferred=is_deferred)
        if wants is states:
            return seconds
        most: dict[Placement, tuple[float, float]] = {}
        for want, forward, backward in zip(wants, *seconds):
            so_far = most.get(want, (0.0, 0.0))
            most[want] = max(so_far[0], forward), max(so_far[1], backward)
        rows = np.array([most.get(state, (0.0, 0.0)) for state in states])
        return rows[:, 0], rows[:, 1]


def overlapped_seconds(
    value: fx.Node, readers: Sequence[ReaderWork], states: Placements, *, is_deferred: bool
) -> tuple[Array, Array]:
    """Return the seconds, forward and backward, in each of the states in which a value is read.
    `is_deferred`: it is made of parameters, whose gradients are summed after their backward."""
    forward, backward = np.zeros(len(states)), np.zeros(len(states))
    is_read_by_linears = info(value).differentiable and all(
        reads_as_linear(reader.reader, value) for reader in readers
    )
    if is_deferred or is_read_by_linears:
        for reader in readers:
            more = reader.by_state(states, is_deferred=is_deferred)
            forward, backward = forward + more[0], backward + more[1]
    return forward, backward
