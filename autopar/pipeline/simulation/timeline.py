"""What a simulated step looks like: when each action runs, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autopar.base.files import write_file
from autopar.errors import require_ending
from autopar.pipeline.memory.activation_counts import Live, live_microbatches
from autopar.pipeline.schedule import Action, Schedule
from autopar.pipeline.simulation.gantt import Gantt
from autopar.text.units import counted

WIDTH = 160  # columns
SUM = "sum of gradients"
UPDATES = "casts and updates of parameters"


@dataclass(frozen=True)
class Synchronization:
    """The all-reduce of a stage's gradient among its replicas, or of what stages share."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    start: float
    end: float
    # Started while some of its ranks still had actions to do.
    early: bool

    @property
    def name(self) -> str:
        """Whose gradients, in words."""
        word = "stage" if len(self.stages) == 1 else "stages"
        return f"{word} {' and '.join(map(str, self.stages))}"


@dataclass(frozen=True)
class Update:
    """What a rank does for its stages when it has summed all gradients."""

    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class CriticalPath:
    """A chain of actions without a gap, from the start of the step to its last end."""

    actions: tuple[Action, ...]
    # How many of its links are messages from one rank to another.
    messages: int

    @property
    def forwards(self) -> int:
        return self._count("F")

    @property
    def backwards(self) -> int:
        """Whole backwards, and the gradients of inputs where the backward is split."""
        return self._count("B") + self._count("I")

    @property
    def weights(self) -> int:
        """Gradients of weights that were split off."""
        return self._count("W")

    def _count(self, kind: str) -> int:
        return sum(len(action.microbatches) for action in self.actions if action.kind == kind)


@dataclass(frozen=True)
class Timeline:
    """A priced step. `starts[rank][i]` and `ends[rank][i]` belong to `schedule.orders[rank][i]`."""

    schedule: Schedule
    starts: list[list[float]] = field(repr=False)
    ends: list[list[float]] = field(repr=False)
    arrivals: list[float] = field(repr=False)  # of messages, by their keys
    # What each stage keeps of a part of a micro-batch for its backward.
    activations: tuple[float, ...]
    synchronizations: tuple[Synchronization, ...] = ()
    updates: tuple[Update, ...] = ()

    @cached_property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last, without synchronisation."""
        return max(ends[-1] if ends else 0.0 for ends in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank works."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends))

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """How long each rank does not work within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble_ratio(self) -> float:
        """The idle part of all ranks' time."""
        total = self.makespan * self.schedule.ranks
        return sum(self.idle) / total if total else 0.0

    @property
    def step_time(self) -> float:
        """The makespan and what synchronisation adds to it, and what follows on that."""
        ends = *(one.end for one in self.synchronizations), *(one.end for one in self.updates)
        return max([self.makespan, *ends])

    @property
    def uncovered_sync(self) -> float:
        """How much longer the step is for gradient synchronisation, and what follows on it."""
        return self.step_time - self.makespan

    @property
    def last_update(self) -> Update | None:
        """That which ends the step, if one does."""
        return next((one for one in self.updates if one.end == self.step_time), None)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most that it keeps for backward at any time, by order alone.

        1 is one micro-batch on all the stages that a rank holds of one pipe.
        """

        def kept(live: Live) -> float:
            return sum(
                self.activations[stage] * (whole + later)
                for stage, (whole, _, later, *_) in live.items()
            )

        by_rank = (live_microbatches(self.schedule, rank) for rank in range(self.schedule.ranks))
        return tuple(max(map(kept, live), default=0.0) for live in by_rank)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """A chain that decides the makespan; among equals, one that follows messages."""
        schedule = self.schedule
        tolerance = 1e-9 * max(self.makespan, 1e-300)
        rank = max(range(schedule.ranks), key=lambda r: self.ends[r][-1] if self.ends[r] else 0.0)
        position = len(self.ends[rank]) - 1
        chain: list[Action] = []
        messages = 0
        while position >= 0:
            chain.append(schedule.orders[rank][position])
            start = self.starts[rank][position]
            first, past = position, position + 1 + chain[-1].overlaps
            if position and schedule.orders[rank][position - 1].overlaps:
                first = past
            awaited = [key for key, _, _ in schedule.messages[rank][first:past] if key >= 0]
            here, position = rank, position - 1
            for key in awaited:
                there, other = schedule.senders[key]
                action = schedule.orders[there][other]
                if self.arrivals[key] >= start - tolerance:
                    messages += there != here
                    # An overlapped forward sends when the backward that follows it is done.
                    rank, position = there, other + action.overlaps
                    break
        return CriticalPath(tuple(reversed(chain)), messages)

    def __str__(self) -> str:
        return draw(self)

    def gantt(self, unit: Callable[[float], str] = "{:g}".format) -> Gantt:
        """The same as a picture, with times as `unit` writes them."""
        after = [(f"{SUM} of {s.name}", s.ranks, s.start, s.end) for s in self.synchronizations]
        after += [(UPDATES, (one.rank,), one.start, one.end) for one in self.updates]
        return Gantt(self.schedule, self.starts, self.ends, after, unit)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, as SVG: a row for each rank, time to the right."""
        require_ending(path, ".svg", "the picture of a time line")
        write_file(path, self.gantt().drawn().file(), "the picture of a time line")


def draw(timeline: Timeline, width: int = WIDTH) -> str:
    """A line for each rank, time to the right, in at most `width` columns.

    Each action is its kind and micro-batch where that fits, else its kind. Pipes other than 0 are
    in small letters. Dots are idle time.
    """
    schedule = timeline.schedule
    title = (
        f"{schedule.name}: {counted(schedule.ranks, 'rank')}, "
        f"{counted(schedule.microbatches, 'micro-batch')}, makespan {timeline.makespan:g}, "
        f"bubble {timeline.bubble_ratio:.1%}"
    )
    margin = len(f"rank {schedule.ranks - 1}")
    room = max(width - margin - len(" ||"), 1)
    rows = [f"{f'rank {rank}':<{margin}} |{row}|" for rank, row in enumerate(_rows(timeline, room))]
    return "\n".join([title, *rows])


def _rows(timeline: Timeline, width: int) -> list[str]:
    schedule = timeline.schedule
    span = timeline.makespan or 1.0
    durations = (
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends)
        for start, end in zip(starts, ends)
    )
    shortest = min(filter(None, durations), default=span)
    label = max(len("+".join(map(str, action.microbatches))) for _, action in schedule.actions)
    # One column more than the label, so that neighbours stay apart.
    scale = (label + 2) / shortest
    labelled = round(scale * span) <= width
    if not labelled:
        scale = width / span
    rows = []
    for order, starts, ends in zip(schedule.orders, timeline.starts, timeline.ends):
        row = ["."] * round(scale * span)
        for action, start, end in zip(order, starts, ends):
            first, past = round(start * scale), round(end * scale)
            letter = action.kind.lower() if action.pipe % 2 else action.kind
            text = letter + "+".join(map(str, action.microbatches)) if labelled else letter
            fill = " " if labelled else letter
            row[first:past] = text.ljust(past - first, fill)[: past - first]
        rows.append("".join(row))
    return rows
