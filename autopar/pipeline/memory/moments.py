"""Moments: the bytes that a rank holds from call to call, in all blocks that one stands for.

Of the calls of a short program a row stands for several equal ones, one after another: it lies
between two `Edge`s of what happens, and what it adds each of them adds. So the bytes of values
follow from the short program; the sums of gradients are gone through as they come, since buckets
hold what a buffer has room for, wherever blocks begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.pipeline.memory.gradient_bytes import GradientBytes
from autopar.strategies.node_info import info


class MemorySample(NamedTuple):
    """The bytes of one rank when a call has made its results, by kind."""

    call: str
    is_backward: bool
    kept: float  # for backward, and what later calls read
    flowing: float  # gradients that are under way
    gradients: float  # of parameters, from calls before
    more: float  # while it runs
    last: float = 0.0  # how much more it is in the last run of a step, which sums gradients
    copies: float | None = None  # of parameters, that live a use; None: what is left is here
    passing: float = 0.0  # of `last`, what goes when these are summed

    @property
    def bytes(self) -> float:
        """Return all bytes but those of the last run."""
        return self.kept + self.flowing + self.gradients + self.more + (self.copies or 0.0)

    def plus(self, **sizes: float) -> MemorySample:
        """Return the sample with more bytes of some kinds, by name."""
        more = {kind: getattr(self, kind) + size for kind, size in sizes.items() if size}
        return self._replace(**more) if more else self


@dataclass(frozen=True)
class GradientReady:
    """Says that a gradient is there: of one of the parameters that a parameter stands for."""

    parameter: fx.Node
    copy: int = 0


@dataclass(frozen=True)
class ReduceStart:
    """Says that complete gradients are summed now, behind a call."""

    moment: MemorySample
    is_end: bool = False  # of backward: gradients that are not complete are summed, too


@dataclass(frozen=True)
class RepeatBoundary:
    """Marks where a repeated block begins or ends, with the bytes held there."""

    kept: float
    flowing: float
    more: int = 0  # for how many others


Event = (
    MemorySample | GradientReady | ReduceStart | RepeatBoundary
)  # moments without the gradients of parameters


@dataclass(frozen=True)
class MemoryOffset:
    """Bytes that blocks which were gone through before add to a sample."""

    kept: float = 0.0
    flowing: float = 0.0

    def of(self, event: Event) -> Event:
        """Return the event with this offset added."""
        if isinstance(event, MemorySample):
            return event.plus(kept=self.kept, flowing=self.flowing)
        if isinstance(event, ReduceStart):
            moment = event.moment.plus(kept=self.kept, flowing=self.flowing)
            return ReduceStart(moment, event.is_end)
        return event

    def and_of(self, count: int, each: MemoryOffset) -> MemoryOffset:
        """Return the offset with so many further blocks."""
        return MemoryOffset(self.kept + count * each.kept, self.flowing + count * each.flowing)


def stretched(events: Iterable[Event], beside: MemoryOffset) -> tuple[list[Event], MemoryOffset]:
    """Return the events with those between two boundaries repeated, and the offset at the end.

    `beside`: the offset at the start. Copies in the middle keep samples alone that may be the peak.
    """
    found: list[Event] = []
    inside: list[Event] = []
    first: RepeatBoundary | None = None
    for event in events:
        if first is None and isinstance(event, RepeatBoundary):
            first, inside = event, []
        elif first is None:
            found.append(beside.of(event))
        elif isinstance(event, RepeatBoundary):
            adds = MemoryOffset(event.kept - first.kept, event.flowing - first.flowing)
            found += _each(inside, first.more, beside, adds)
            beside, first = beside.and_of(first.more, adds), None
        else:
            inside.append(event)
    return found, beside


def _each(
    inside: Sequence[Event], more: int, beside: MemoryOffset, adds: MemoryOffset
) -> Iterator[Event]:
    """Yield all copies of the events of a block, of backward from the last block on."""
    middle = _highest(inside)
    for number in range(more + 1):
        now = beside.and_of(number, adds)
        for event in inside if number in (0, more) else middle:
            if isinstance(event, GradientReady) and _stands_for_others(event):
                yield GradientReady(event.parameter, more - number)
            else:
                yield now.of(event)


def _stands_for_others(event: Event) -> bool:
    return isinstance(event, GradientReady) and info(event.parameter).count > 1


def _highest(events: Sequence[Event]) -> list[Event]:
    """Return the events of a block between others, with the samples alone that may be the peak:
    where no sum begins, none, since the first or the last block has more; else the highest from
    one event to the next."""
    if not any(isinstance(event, ReduceStart) for event in events):
        return [event for event in events if isinstance(event, GradientReady)]
    found: list[Event] = []
    high: dict[bool, MemorySample] = {}  # by whether copies are here
    for event in events:
        if isinstance(event, MemorySample):
            before = high.get(event.copies is None)
            if before is None or event.bytes > before.bytes:
                high[event.copies is None] = event
        else:
            found += [*high.values(), event]
            high.clear()
    return [*found, *high.values()]


def summed(events: Iterable[Event], sums: GradientBytes) -> Iterator[MemorySample]:
    """Yield the samples, with the gradients of parameters as they come and are summed."""
    for event in events:
        if isinstance(event, MemorySample):
            yield _with(event, sums)
        elif isinstance(event, GradientReady):
            sums.arrive(event.parameter, event.copy)
        elif isinstance(event, ReduceStart):
            for more, last in sums.begin(is_end=event.is_end):
                moment = _with(event.moment, sums).plus(last=last, passing=last)
                yield moment._replace(more=more)


def _with(moment: MemorySample, sums: GradientBytes) -> MemorySample:
    return moment.plus(
        flowing=sums.waiting, gradients=sums.there, last=sums.last, passing=sums.passing
    )
