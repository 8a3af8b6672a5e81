"""A simulated step: when each action runs, and the idle time and critical path that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from autopar.base.files import write_file
from autopar.errors import require_ending
from autopar.pipeline.memory.activation_counts import live_counts
from autopar.pipeline.schedule import KIND_NAMES, KINDS, SUM, Action, Schedule
from autopar.pipeline.simulation.action_times import ActionTimes
from autopar.pipeline.simulation.gantt import Gantt
from autopar.pipeline.simulation.repeated_step import RankTimes
from autopar.pipeline.weight_versions import versions_alive
from autopar.text.units import counted

WIDTH = 160  # columns
UPDATES = "casts and updates of parameters"


@dataclass(frozen=True)
class Synchronization:
    """Time the all-reduce of a stage's gradient among its replicas, or of shared parameters."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    start: float
    end: float
    # Started while some of its ranks still had actions to do.
    early: bool

    @property
    def name(self) -> str:
        """Return the stages whose gradients are summed, in words."""
        word = "stage" if len(self.stages) == 1 else "stages"
        return f"{word} {' and '.join(map(str, self.stages))}"


@dataclass(frozen=True)
class Update:
    """Time the work of a rank for its stages after it has summed all gradients."""

    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class CriticalPath:
    """List a chain of actions without a gap, from the start of the step to its last end."""

    actions: tuple[Action, ...]
    # The number of its links that are messages from one rank to another.
    messages: int

    @property
    def forwards(self) -> int:
        return self._count("F")

    @property
    def backwards(self) -> int:
        """Return the number of unsplit backwards and of input gradients."""
        return self._count("B") + self._count("I")

    @property
    def weights(self) -> int:
        """Return the number of weight gradients that were split off."""
        return self._count("W")

    def _count(self, kind: str) -> int:
        return sum(len(action.microbatches) for action in self.actions if action.kind == kind)


@dataclass(frozen=True)
class Timeline:
    """Hold a simulated step: `starts[rank][i]` is the start of `schedule.orders[rank][i]`.

    The times of single actions are computed when they are read; the figures do without them.
    """

    schedule: Schedule
    rank_times: RankTimes = field(repr=False)
    time_actions: Callable[[], ActionTimes] = field(repr=False, compare=False)
    # The size that each stage keeps for backward of a part of a micro-batch.
    activations: tuple[float, ...]
    synchronizations: tuple[Synchronization, ...] = ()
    updates: tuple[Update, ...] = ()
    # Of an asynchronous schedule, how much of this step the next one hides.
    drain: float = 0.0

    @cached_property
    def _times(self) -> ActionTimes:
        return self.time_actions()

    @property
    def starts(self) -> list[list[float]]:
        """Return the start of each action, by rank."""
        return self._times.starts

    @property
    def ends(self) -> list[list[float]]:
        """Return the end of each action, by rank."""
        return self._times.ends

    @cached_property
    def makespan(self) -> float:
        """Return the time from the first action to the end of the last, synchronisation aside."""
        return max(self.rank_times.done)

    @property
    def busy(self) -> tuple[float, ...]:
        """Return the time for which each rank works."""
        return self.rank_times.busy

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Return the time within the makespan in which each rank waits."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble_ratio(self) -> float:
        """Return the idle share of all ranks' time."""
        total = self.makespan * self.schedule.ranks
        return sum(self.idle) / total if total else 0.0

    @property
    def step_time(self) -> float:
        """Return the makespan with synchronisation and the updates that follow on it."""
        sums, updates = (s.end for s in self.synchronizations), (u.end for u in self.updates)
        return max([self.makespan, *sums, *updates])

    @property
    def seconds(self) -> float:
        """Return the time that a step adds to a run of steps."""
        return self.step_time - self.drain

    @property
    def uncovered_sync(self) -> float:
        """Return the time that gradient synchronisation and updates add to the makespan."""
        return self.step_time - self.makespan

    @property
    def last_update(self) -> Update | None:
        """Return the update that ends the step; None if an action or a sum ends it."""
        return next((update for update in self.updates if update.end == self.step_time), None)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Return the most that each rank keeps for backward at any time, by order alone.

        1 is one micro-batch on all the stages that a rank holds of one pipe.
        """

        short, peaks = self.schedule.short, list[float]()  # in which ranks keep as much
        for rank in range(short.ranks):
            sizes = [self.activations[stage] for stage in short.stages_on(rank)]
            counts = live_counts(short, rank)
            kept = (counts[..., 0] + counts[..., 2]) @ np.array(sizes)
            peaks.append(float(kept.max(initial=0.0)))
        return tuple(peaks)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Return, by stage, the most versions of its weights that a rank holds at once."""
        return versions_alive(self.schedule.short)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """Return a chain that decides the makespan; among equals, one that follows messages."""
        schedule = self.schedule
        tolerance = 1e-9 * max(self.makespan, 1e-300)
        rank = max(range(schedule.ranks), key=self.rank_times.done.__getitem__)
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
            receiver, position = rank, position - 1
            for key in awaited:
                sender, other = schedule.senders[key]
                action = schedule.orders[sender][other]
                if self._times.arrivals[key] >= start - tolerance:
                    messages += sender != receiver
                    # An overlapped forward sends when the backward that follows it is done.
                    rank, position = sender, other + action.overlaps
                    break
        worked = (action for action in reversed(chain) if action.kind in KINDS)
        return CriticalPath(tuple(worked), messages)

    def __str__(self) -> str:
        return draw(self)

    def gantt(self, unit: Callable[[float], str] = "{:g}".format) -> Gantt:
        """Return the step as a picture, with times as `unit` writes them."""
        after = [
            (f"{KIND_NAMES[SUM]} of {s.name}", s.ranks, s.start, s.end)
            for s in self.synchronizations
        ]
        after += [(UPDATES, (u.rank,), u.start, u.end) for u in self.updates]
        return Gantt(self.schedule, self.starts, self.ends, after, unit)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, as SVG: a row for each rank, time to the right."""
        require_ending(path, ".svg", "the picture of a time line")
        write_file(path, self.gantt().drawn().file(), "the picture of a time line")


def draw(timeline: Timeline, width: int = WIDTH) -> str:
    """Return a line of text for each rank, time to the right, in at most `width` columns.

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
    worked = (action for _, action in schedule.actions if action.kind in KINDS)
    label = max(len("+".join(map(str, action.microbatches))) for action in worked)
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
