"""Gantt: a step of a pipeline as a picture, a row for each rank, time to the right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.pipeline.schedule import WORDS, Action, Schedule
from autopar.text.drawing import Axis, Drawing
from autopar.text.units import counted, share_text

_WIDTH, _LEFT, _ROW, _GAP, _ABOVE, _BELOW = 960.0, 56.0, 22.0, 4.0, 26.0, 22.0
_EACH = 3000  # actions that are boxes of their own


@dataclass(frozen=True)
class Gantt:
    """When each action of a schedule ran: `starts[rank][i]` of `schedule.orders[rank][i]`."""

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    after: Sequence[tuple[str, Sequence[int], float, float]]  # what is done once: ranks, from, to
    unit: Callable[[float], str]

    @cached_property
    def last(self) -> float:
        """The end of the last action."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """The same with what is done once a step."""
        return max([self.last, *(end for *_, end in self.after)])

    @cached_property
    def idle(self) -> str:
        """The part of all ranks' time in which they wait for others."""
        busy = sum(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends))
        return share_text(1 - busy / (self.last * self.schedule.ranks or 1.0))

    def drawn(self, until: float = 0.0) -> Drawing:
        """What each rank does when: actions, what it does once a step, and in grey what is idle;
        time goes on to `until` at least."""
        made = self.schedule
        height = _ABOVE + made.ranks * (_ROW + _GAP) + _BELOW
        label = (
            f"{made.name}: {counted(made.ranks, 'rank')}, "
            f"{counted(made.microbatches, 'micro-batch')}, step {self.unit(self.end)}, "
            f"idle {self.idle}"
        )
        picture = Drawing(_WIDTH, height, label)
        axis = Axis(0.0, max(self.end, until), _LEFT, _WIDTH - 24)
        self._legend(picture)
        for value in axis.ticks(8):
            x = axis.at(value)
            picture.line([(x, _ABOVE - 4), (x, height - _BELOW)], "rule")
            picture.text(x, height - 6, self.unit(value), "middle")
        for rank in range(made.ranks):
            picture.text(_LEFT - 6, _top(rank) + _ROW / 2 + 4, f"rank {rank}", "end")
            picture.box(_LEFT, _top(rank), axis.at(self.last) - _LEFT, _ROW, "idle")
        self._actions(picture, axis)
        for name, ranks, start, end in self.after:
            left, right = axis.at(start), axis.at(end)
            title = f"{name}, {self.unit(end - start)}"
            for rank in ranks:
                picture.box(left, _top(rank) + _ROW - 5, right - left, 5, "sync", title)
        return picture

    def _actions(self, picture: Drawing, axis: Axis) -> None:
        count = sum(map(len, self.schedule.orders))
        together = defaultdict(list)
        for rank, order in enumerate(self.schedule.orders):
            for action, start, end in zip(order, self.starts[rank], self.ends[rank]):
                left, right = axis.at(start), axis.at(end)
                place = left, _top(rank) + 1, right - left, _ROW - 2
                kind = f"{action.kind}{action.pipe % 2}"
                if count > _EACH:
                    together[kind].append(place)
                    continue
                picture.box(*place, kind, title=f"{_words(action)}, {self.unit(end - start)}")
                name = "+".join(map(str, action.microbatches))
                if right - left > 7 * len(name) + 2:
                    middle = (left + right) / 2, _top(rank) + _ROW / 2 + 3.5
                    picture.text(*middle, name, f"inside{action.pipe % 2}")
        for kind, places in together.items():
            picture.boxes(places, kind)

    def _legend(self, picture: Drawing) -> None:
        made, x = self.schedule, _LEFT
        for kind, pipe in sorted(
            {(a.kind, a.pipe % 2) for _, a in made.actions},
            key=lambda one: ([*WORDS].index(one[0]), one[1]),
        ):
            words = WORDS[kind] + (f", pipe {pipe}" if made.pipes > 1 else "")
            x = _entry(picture, x, f"{kind}{pipe}", words)
        if self.after:
            x = _entry(picture, x, "sync", "sums of gradients, and what is done once a step")
        _entry(picture, x, "idle", f"idle: {self.idle}")


def _top(rank: int) -> float:
    return _ABOVE + rank * (_ROW + _GAP)


def _words(action: Action) -> str:
    numbers = " and ".join(map(str, action.microbatches))
    pipe = f" of pipe {action.pipe}" if action.pipe else ""
    return f"{WORDS[action.kind]} of micro-batch {numbers}, stage {action.stage}{pipe}"


def _entry(picture: Drawing, x: float, kind: str, words: str) -> float:
    picture.box(x, 4, 10, 10, kind)
    picture.text(x + 14, 13, words)
    return x + 26 + 6.2 * len(words)
