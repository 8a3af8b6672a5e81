"""Promises: in which order sizes are weighed, and what a step in so many stages takes at least.

promises = Promises(captured, request, ideal)
promises.of(4, 16)              # the least comes first: seconds, as far as one can tell
promises.known[4, 8] = 0.1      # with the fastest layouts, if there were all memory
promises.least(4, 16)           # then 0.1 at least: smaller micro-batches take no less in all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from autopar.capture.captured import Captured
from autopar.cost.footprint import whole_bytes
from autopar.planner.hosting import least_update
from autopar.planner.ideal import Ideal
from autopar.planner.recomputation import PLAIN
from autopar.planner.request import Request

AGAIN = 1.15  # times what a step takes, where some of its forward runs again
_MOVES = 1.15  # times what its operators take, as long as nothing is known of what moves


class Promises:
    """What sizes promise, the better the more is known of their layouts."""

    def __init__(self, captured: Captured, request: Request, ideal: Ideal) -> None:
        self._captured, self._request, self._ideal = captured, request, ideal
        self.known: dict[tuple[int, int], float] = {}  # seconds by stages and micro-batches

    def of(self, stages: int, parts: int, is_hosted: bool = False) -> tuple[float, int]:
        """What a step is likely to take, with stages that wait for one another and with what has to
        run again to fit. Where states have to be cut, many micro-batches leave most room.
        `is_hosted`: with states on the host, which takes longer than what else there is."""
        run = parts / stages * self._ideal.run(parts * self._request.meshes(stages)[0].size)
        waits = 1 + (stages - 1) / parts / 2
        most_room = -parts if self.states > self._request.memory else 0
        seconds = max(run, self.least(stages, parts)) * waits
        seconds *= 1.0 if (stages, parts) in self.known else _MOVES
        if stages == 1:  # as much runs again as has to
            pieces = parts * self._request.cluster.devices
            seconds += parts * self._ideal.room.least_again(parts, pieces, is_hosted)
        else:
            live = self.states + self.kept * min(stages, parts) / parts
            is_over = live / self._request.cluster.devices > self._request.roomiest
            seconds *= AGAIN if is_over else 1.0
        return (seconds + self.update) * AGAIN if is_hosted else seconds, most_room

    def least(self, stages: int, parts: int) -> float:
        """What a step takes at least in so many stages, as far as it is known: the smaller its
        micro-batches are, the more it takes, whatever layouts it has."""
        known = self.known.items()
        return max((t for (n, m), t in known if n == stages and m <= parts), default=0.0)

    def next(self, left: Sequence[tuple[int, int]], likely: int) -> int:
        """Which of these sizes to look at: the first or, where layouts are to be looked for, the
        one with as many stages and the fewest micro-batches. With more, no step takes less.
        Of the first, which are as `likely` to be the best, one whose layouts are known."""
        if left[0] in self.known or self._request.mode != "auto":
            return 0
        for number, size in enumerate(left[:likely]):
            if size in self.known:
                return number
        alike = [size for size in left if size[0] == left[0][0] and size not in self.known]
        return left.index(min(alike))

    def is_crowded(self, stages: int, parts: int) -> bool:
        """Whether what one micro-batch keeps for backward does not fit: each tensor is cut over all
        devices, at most."""
        room = self._request.roomiest
        return room < math.inf and self.kept / parts / self._request.cluster.devices > room

    @cached_property
    def update(self) -> float:
        """The seconds that an optimizer on the host adds, at least."""
        return least_update(self._captured, self._request)

    @cached_property
    def states(self) -> float:
        """The bytes of parameters, their gradients and what an optimizer keeps of them."""
        return sum(whole_bytes(self._captured).values())

    @cached_property
    def kept(self) -> float:
        """The bytes that a program keeps for backward."""
        return self._ideal.room.kept(PLAIN)
