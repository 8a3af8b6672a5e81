"""Gantt: a step of a pipeline as a picture, a row for each rank, time to the right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.pipeline.schedule import KIND_NAMES, KINDS, UPDATE, Action, Schedule
from autopar.text.drawing import WIDE, Axis, Drawing, legend_places
from autopar.text.units import counted, share_text

_LEFT, _ROW, _GAP, _BELOW = 56.0, 22.0, 4.0, 22.0
_MOST_TITLED = 3000  # actions; of more, boxes have no titles


@dataclass(frozen=True)
class Gantt:
    """Draw when each action ran: `starts[rank][i]` is that of `schedule.orders[rank][i]`."""

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    # Beside and behind actions: the name, ranks, begin and end of a sum, a gather or an update.
    after: Sequence[tuple[str, Sequence[int], float, float]]
    unit: Callable[[float], str]

    @cached_property
    def last(self) -> float:
        """Return the end of the last action."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """Return the end of the step, with the work that is done once a step."""
        return max([self.last, *(end for *_, end in self.after)])

    @cached_property
    def bubble(self) -> str:
        """Return the share of all ranks' time in which they wait for others, as text."""
        busy = sum(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends))
        return share_text(1 - busy / (self.last * self.schedule.ranks or 1.0))

    def drawn(self, until: float = 0.0, width: float = WIDE) -> Drawing:
        """Draw a row for each rank: its actions, its work once a step, and the bubble in grey.

        The time axis goes on to `until` at least.
        """
        schedule, legend = self.schedule, self._legend()
        places = legend_places([*legend], _LEFT, width)
        above = 16.0 + places[-1][2]
        height = above + schedule.ranks * (_ROW + _GAP) + _BELOW
        label = (
            f"{schedule.name}: {counted(schedule.ranks, 'rank')}, "
            f"{counted(schedule.microbatches, 'micro-batch')}, step {self.unit(self.end)}, "
            f"bubble {self.bubble}"
        )
        picture = Drawing(width, height, label)
        axis = Axis(0.0, max(self.end, until), _LEFT, width - 24)
        for words, x, y in places:
            picture.box(x, y - 6, 10, 10, legend[words])
            picture.text(x + 14, y + 3, words)
        for value, words in axis.labels(8, self.unit, room=8.0):
            x = axis.at(value)
            picture.line([(x, above - 4), (x, height - _BELOW)], "rule")
            picture.text(x, height - 6, words, "middle")
        tops = [above + rank * (_ROW + _GAP) for rank in range(schedule.ranks)]
        for rank, top in enumerate(tops):
            picture.text(_LEFT - 6, top + _ROW / 2 + 4, f"rank {rank}", "end")
            picture.box(_LEFT, top, axis.at(self.last) - _LEFT, _ROW, "bubble")
        self._actions(picture, axis, tops)
        for name, ranks, start, end in self.after:
            left, right = axis.at(start), axis.at(end)
            title = f"{name}, {self.unit(end - start)}"
            for rank in ranks:
                picture.box(left, tops[rank] + _ROW - 5, right - left, 5, "sync", title)
        return picture

    def _actions(self, picture: Drawing, axis: Axis, tops: Sequence[float]) -> None:
        count = sum(map(len, self.schedule.orders))
        untitled = defaultdict(list)
        for rank, order in enumerate(self.schedule.orders):
            for action, start, end in zip(order, self.starts[rank], self.ends[rank]):
                left, right = axis.at(start), axis.at(end)
                top, width, height = tops[rank] + 1, right - left, _ROW - 2
                if action.kind == UPDATE:
                    picture.box(right - 1, top, 2, height, "sync", title=_words(action))
                if action.kind not in KINDS:
                    continue  # a sum is drawn from its start to its end, beside actions
                kind = f"{action.kind}{action.pipe % 2}"
                if count > _MOST_TITLED:
                    untitled[kind].append((left, top, width, height))
                    continue
                title = f"{_words(action)}, {self.unit(end - start)}"
                picture.box(left, top, width, height, kind, title=title)
                name = "+".join(map(str, action.microbatches))
                if width > 7 * len(name) + 2:
                    middle = (left + right) / 2
                    picture.text(middle, top + _ROW / 2 + 2.5, name, f"inside{action.pipe % 2}")
        for kind, boxes in untitled.items():
            picture.boxes(boxes, kind)

    def _legend(self) -> dict[str, str]:
        """Return the words for each class of boxes, with the class."""
        schedule, legend = self.schedule, dict[str, str]()
        for kind, pipe in sorted(
            {(a.kind, a.pipe % 2) for _, a in schedule.actions if a.kind in KINDS},
            key=lambda entry: ([*KIND_NAMES].index(entry[0]), entry[1]),
        ):
            words = KIND_NAMES[kind] + (f", pipe {pipe}" if schedule.pipes > 1 else "")
            legend[words] = f"{kind}{pipe}"
        if any(action.kind == UPDATE for _, action in schedule.short.actions):
            legend[KIND_NAMES[UPDATE]] = "sync"
        if self.after:
            legend["gathers and sums beside actions, and what is done once a step"] = "sync"
        return {**legend, f"bubble: {self.bubble}": "bubble"}


def _words(action: Action) -> str:
    numbers = " and ".join(map(str, action.microbatches))
    pipe = f" of pipe {action.pipe}" if action.pipe else ""
    return f"{KIND_NAMES[action.kind]} of micro-batch {numbers}, stage {action.stage}{pipe}"
