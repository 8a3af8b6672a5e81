"""Promises: in which order sizes are weighed, and what a step in so many stages takes at least.

promises = Promises(captured, request, ideal, 96)
promises.of(Size(4, 16))        # the least comes first: seconds, as far as one can tell
promises.known[4, 8] = 0.1      # with the fastest layouts, if there were all memory
promises.known_least(4, 16)          # then 0.1 at least: smaller micro-batches take no less in all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.cost.footprint import unsharded_bytes
from autopar.pipeline.schedules import most_chunks
from autopar.planner.hosting import least_update
from autopar.planner.ideal import Ideal
from autopar.planner.recomputation import PLAIN
from autopar.planner.request import Request
from autopar.recompute import Recompute

AGAIN = 1.15  # times what a step takes with states on the host: others are looked at first
_LIKELY = 1.1  # times what a step is to take: what promises more does not take that
_CLOSE = 1.03  # the same where layouts are known
_ABOUT = 1.2  # times what the best promises, as long as nothing was found
_MOVES = 1.15  # times what its operators take, as long as nothing is known of what moves


class Size(NamedTuple):
    """Of a step: how many stages and micro-batches, and whether states are on the host."""

    stages: int
    parts: int
    is_hosted: bool = False


def size_of(way: Candidate) -> Size:
    """That of a way to run a step, wherever its states are."""
    stages = 1 if way.pipelining is None else way.pipelining.schedule.ranks
    return Size(stages, way.microbatches)


class Promises:
    """What sizes promise, the better the more is known of their layouts."""

    def __init__(self, captured: Captured, request: Request, ideal: Ideal, blocks: int) -> None:
        """`blocks`: the equal blocks of the program."""
        self._captured, self._request, self._ideal = captured, request, ideal
        self._blocks = blocks
        self.known: dict[tuple[int, int], float] = {}  # seconds by stages and micro-batches
        # By kind and whether states are on the host, and the part of the micro-batches that is
        # live: bytes on the fullest rank.
        self._seen: dict[tuple[Recompute, bool], dict[float, float]] = {}
        self._pieces: float | None = None  # times the seconds of a step, if regions keep pieces

    def of(self, size: Size) -> tuple[float, int]:
        """What a step is likely to take, with stages that wait for one another and with what has to
        run again to fit. Where states have to be cut, many micro-batches leave most room.
        With states on the host it takes longer than what else there is."""
        stages, parts, is_hosted = size
        inner = self._request.inner(stages)
        waits = 1 + max(0, stages - 2) / parts / most_chunks(stages, parts, self._blocks)
        most_room = -parts if self.states > self._request.memory else 0
        moves = 1.0 if (stages, parts) in self.known else _MOVES
        of_run = self._ideal.shared if stages > 1 else self._ideal.run
        run = parts / stages * of_run(parts * inner)
        seconds = max(run * moves, self.known_least(stages, parts)) * waits
        pieces = parts * inner
        if stages > 1:
            times, share = parts / stages * waits, min(stages, parts) / parts
            seconds = self._staged(seconds, times, pieces, share, is_hosted)
        else:  # as much runs again as has to
            seconds += parts * self._ideal.room.least_again(parts, pieces, is_hosted)
        return (seconds + self.update) * AGAIN if is_hosted else seconds, most_room

    def _staged(
        self, seconds: float, times: float, pieces: int, share: float, is_hosted: bool
    ) -> float:
        """What a pipeline takes that is to take so many `seconds` if nothing runs again, of which
        a part of the micro-batches is live, as all regions are treated in one way that is likely to
        have room; `times`: how often what one of them does again counts."""
        room, longer = self._ideal.room, self._pieces or 1.0
        return min(
            seconds * (longer if kind.keep == "cut" else 1.0) + times * room.again(pieces, kind)
            for kind in room.staged
            if kind == room.staged[-1] or self._may_hold(kind, share, is_hosted)
        )

    def note(self, kind: Recompute, size: Size, needed: float) -> None:
        """Some rank needs so many bytes, all regions treated so."""
        stages, parts, is_hosted = size
        seen, share = self._seen.setdefault((kind, is_hosted), {}), min(stages, parts) / parts
        seen[share] = min(needed, seen.get(share, math.inf))

    def note_pieces(self, times: float) -> None:
        """A step took so many times as long where its regions kept pieces."""
        self._pieces = min(self._pieces or times, times)

    def _may_hold(self, kind: Recompute, share: float, is_hosted: bool) -> bool:
        """Whether that part of the micro-batches is likely to have room: each tensor is cut over
        all ranks at most; and with fewer than were seen less is needed, but seldom in proportion.
        """
        room, limit = self._ideal.room, self._request.roomiest
        if not room.is_free or limit == math.inf:
            return True
        seen = self._seen.get((kind, is_hosted), {}).items()
        most = max((needed * min(1.0, share / other) for other, needed in seen), default=0.0)
        return room.kept(kind) * share <= room.left(is_hosted) and most <= limit

    def known_least(self, stages: int, parts: int) -> float:
        """What a step takes at least in so many stages, as far as it is known: of parts of its
        micro-batches it takes no less, whatever layouts it has."""
        known = self.known.items()
        return max((t for (n, m), t in known if n == stages and parts % m == 0), default=0.0)

    def run(self, size: Size) -> float:
        """What its operators take at least, whatever is known of layouts."""
        stages, parts, is_hosted = size
        run = self._ideal.run(parts * self._request.inner(stages), stages > 1)
        return parts / stages * run + (self.update if is_hosted else 0.0)

    @cached_property
    def least_run(self) -> float:
        """The same of any size."""
        return min(self.run(Size(*size)) for size in self._request.sizes())

    def least(self, size: Size, saved: float) -> float:
        """What a step takes at least; `saved`: by cut states, of what is known with whole ones."""
        known = self.known_least(size.stages, size.parts) - saved / size.stages
        return max(self.run(size), known)

    def least_of_all(self, own: Size, known: float, saved: float, left: Sequence[Size]) -> float:
        """The same of a step of its `own` size, which takes no less than is `known` of it, or of
        one that was `left`."""
        here = max(self.run(own), known - saved / own.stages)
        return min([here, *(self.least(size, saved) for size in left)])

    def likely(self, size: Size, seconds: float) -> bool:
        """Whether a step may well take about so many seconds: what is known of its layouts is the
        least that they take."""
        promised, _ = self.of(size)
        promised /= AGAIN if size.is_hosted else 1.0  # which says only that it is looked at late
        return promised <= (_CLOSE if size[:2] in self.known else _LIKELY) * seconds

    def next(self, left: Sequence[Size], has_found: bool, tried: int) -> int:
        """Which of these sizes to look at: the first or, where layouts are to be looked for, the
        one with as many stages and the fewest micro-batches: with more, no step takes less. As long
        as nothing was found, of those that promise about as much one whose layouts are known, or
        with the fewest stages, the more readily the more sizes were `tried` in vain."""
        if self._request.mode != "auto":
            return 0
        chosen = left[0]
        if not has_found:
            most = _ABOUT ** (1 + tried) * self.of(chosen)[0]
            alike = [one for one in left if self.of(one)[0] <= most]
            known = [one for one in alike if one[:2] in self.known]
            if tried and alike:
                chosen = next(one for one in alike if one.stages == min(alike).stages)
            elif chosen[:2] not in self.known:
                chosen = known[0] if known else min(alike)
        if chosen[:2] in self.known:
            return left.index(chosen)
        unknown = [s for s in left if s.stages == chosen.stages and s[:2] not in self.known]
        return left.index(min(unknown))

    def is_crowded(self, stages: int, parts: int) -> bool:
        """Whether what one micro-batch keeps for backward does not fit, each tensor cut over all
        devices, unless some of it is recomputed."""
        room = self._request.roomiest
        return (
            self._ideal.room.is_free
            and room < math.inf
            and self.kept / parts / self._request.cluster.devices > room
        )

    @property
    def needs_host(self) -> bool:
        """Whether all devices together cannot hold what there is of parameters."""
        return self.states > self._request.roomiest * self._request.cluster.devices

    @cached_property
    def update(self) -> float:
        """The seconds that an optimizer on the host adds, at least."""
        return least_update(self._captured, self._request)

    @cached_property
    def states(self) -> float:
        """The bytes of parameters, their gradients and what an optimizer keeps of them."""
        return sum(unsharded_bytes(self._captured).values())

    @cached_property
    def kept(self) -> float:
        """The bytes that a program keeps for backward."""
        return self._ideal.room.kept(PLAIN)
