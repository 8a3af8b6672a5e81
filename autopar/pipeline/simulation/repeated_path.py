"""Repeated path: the work on the longest path of a schedule that repeats a part.

The last end is followed back from each node to the one that it waited for: behind the repeated
part, then from state to state, at last before it.
"""

from __future__ import annotations

import numpy as np

from autopar.pipeline.simulation.repeated_step import GraphSegment, RepeatedStep
from autopar.pipeline.simulation.step_graph import Array


def longest_path(step: RepeatedStep, table: Array, repeats: int) -> Array:
    """Return how often each time of the table is on the longest path, with so many periods more."""
    before = step.before.run(table, np.zeros((0, 1)))
    period = step.period.run(table, step.identity)
    matrix, state = period[step.next_state], before[step.first_state, 0]
    choices = list[Array]()
    for _ in range(repeats + 1):
        reached = matrix + state
        choices.append(reached.argmax(axis=1))
        state = reached.max(axis=1)
    after = step.after.run(table, state[:, None])[:, 0]
    counts = np.zeros(len(table))
    at = _follow(step.after, table, after, int(step.done[after[step.done].argmax()]), counts)
    known = dict[tuple[int, int], Array]()
    for choice in reversed(choices):
        before_it = int(choice[at])
        if (at, before_it) not in known:
            known[at, before_it] = inside = np.zeros(len(table))
            _follow(step.period, table, period[:, before_it], int(step.next_state[at]), inside)
        counts += known[at, before_it]
        at = before_it
    _follow(step.before, table, before[:, 0], int(step.first_state[at]), counts)
    return counts


def _follow(segment: GraphSegment, table: Array, values: Array, place: int, counts: Array) -> int:
    """Add the times on the way back to the start of a segment, and return the node of the state
    from which the way comes."""
    weights = segment.weights(table)
    while place >= segment.first:
        node = place - segment.first
        way = int((values[segment.waits[node]] + weights[node]).argmax())
        counts[segment.times[node]] += segment.counts[node]
        counts[segment.delays[node, way]] += 1
        place = int(segment.waits[node, way])
    return place - segment.first_state
