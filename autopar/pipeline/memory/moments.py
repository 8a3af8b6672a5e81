"""Moments: what a rank holds as a program goes through its calls, for every block that one stands
for.

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
        """All of it."""
        return self.kept + self.flowing + self.gradients + self.more + (self.copies or 0.0)

    def beside(
        self,
        kept: float = 0.0,
        flowing: float = 0.0,
        gradients: float = 0.0,
        last: float = 0.0,
        passing: float = 0.0,
    ) -> MemorySample:
        """With so much besides."""
        if not (kept or flowing or gradients or last or passing):
            return self
        return MemorySample(
            self.call,
            self.is_backward,
            self.kept + kept,
            self.flowing + flowing,
            self.gradients + gradients,
            self.more,
            self.last + last,
            self.copies,
            self.passing + passing,
        )


@dataclass(frozen=True)
class GradientReady:
    """The gradient of a parameter is there: of one that stands for several, of one of these."""

    parameter: fx.Node
    copy: int = 0


@dataclass(frozen=True)
class ReduceStart:
    """Gradients that are complete are summed, as a call has been gone through."""

    moment: MemorySample
    all_: bool = False  # also those that are not


@dataclass(frozen=True)
class RepeatBoundary:
    """Where the calls that stand for others begin or end, with what is held there."""

    kept: float
    flowing: float
    more: int = 0  # for how many others


Event = (
    MemorySample | GradientReady | ReduceStart | RepeatBoundary
)  # moments without the gradients of parameters


@dataclass(frozen=True)
class MemoryOffset:
    """By what a program of more blocks has more."""

    kept: float = 0.0
    flowing: float = 0.0

    def of(self, event: Event) -> Event:
        """The same there."""
        if isinstance(event, MemorySample):
            return event.beside(self.kept, self.flowing)
        if isinstance(event, ReduceStart):
            return ReduceStart(event.moment.beside(self.kept, self.flowing), event.all_)
        return event

    def and_of(self, count: int, each: MemoryOffset) -> MemoryOffset:
        """With so many blocks besides."""
        return MemoryOffset(self.kept + count * each.kept, self.flowing + count * each.flowing)


def stretched(events: Iterable[Event], beside: MemoryOffset) -> tuple[list[Event], MemoryOffset]:
    """What happens where what lies between two edges comes as often more as these say; `beside` at
    its start, then at its end. Of those in the middle no more than may be the most."""
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
    """All copies of what lies between two edges, backward from the last of them."""
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
    """What may be the most of a block between others: where no sum begins, nothing, since it lies
    between the first and the last of them; else the highest moments from one event to the next."""
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
    """The moments, with the gradients of parameters as they come and are summed."""
    for event in events:
        if isinstance(event, MemorySample):
            yield _with(event, sums)
        elif isinstance(event, GradientReady):
            sums.arrive(event.parameter, event.copy)
        elif isinstance(event, ReduceStart):
            for more, last in sums.begin(is_end=event.all_):
                moment = _with(event.moment, sums).beside(last=last, passing=last)
                yield moment._replace(more=more)


def _with(moment: MemorySample, sums: GradientBytes) -> MemorySample:
    about = sums.waiting, sums.there, sums.last, sums.passing
    return moment.beside(0.0, *about)
