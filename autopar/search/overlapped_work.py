"""Computed: what the readers of a value compute while the value, or its gradient, is moved.

Beside what a parameter moves that is the readers' forward and backward; beside what brings back the
gradient of an activation, the gradients of weights, where linears alone read it.
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
    """A reader, in all ways in which it can run."""

    reader: fx.Node
    offered: Candidates
    position: int  # of the value among its inputs

    def seconds(self, late: bool) -> tuple[Array, Array]:
        """Of each strategy, forward and backward."""
        if late:
            return self.offered.forward, self.offered.backward
        return np.zeros(len(self.offered.strategies)), self.offered.weight_seconds

    def by_state(self, states: Placements, late: bool) -> tuple[Array, Array]:
        """The same of each state: the most of those strategies that want it."""
        wants, seconds = self.offered.inputs[self.position], self.seconds(late)
        if wants is states:
            return seconds
        most: dict[Placement, tuple[float, float]] = {}
        for want, forward, backward in zip(wants, *seconds):
            before = most.get(want, (0.0, 0.0))
            most[want] = max(before[0], forward), max(before[1], backward)
        found = np.array([most.get(state, (0.0, 0.0)) for state in states])
        return found[:, 0], found[:, 1]


def overlapped_seconds(
    value: fx.Node, ways: Sequence[ReaderWork], states: Placements, late: bool
) -> tuple[Array, Array]:
    """Seconds, forward and backward, in each of the states in which readers share a value.

    `late`: it is made of parameters, whose gradients are summed late."""
    forward, backward = np.zeros(len(states)), np.zeros(len(states))
    alone = info(value).differentiable and all(reads_as_linear(way.reader, value) for way in ways)
    if late or alone:
        for way in ways:
            more = way.by_state(states, late)
            forward, backward = forward + more[0], backward + more[1]
    return forward, backward
