"""Comparison: a simulated and a measured trace of one plan, and which predictions were off."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import WORDS
from autopar.report.trace import ACTIONS, Event, Trace
from autopar.tables import table
from autopar.units import seconds_text


@dataclass(frozen=True)
class Pair:
    """What was predicted, and the median of what was measured; seconds."""

    what: str
    predicted: float
    measured: float
    count: int  # measurements

    @property
    def ratio(self) -> float:
        """How many times as long as predicted."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Comparison:
    """The step, then its kinds of actions by stage and what comes after all of them, those first
    that are most seconds off."""

    step: Pair
    actions: tuple[Pair, ...]

    def to_json(self) -> dict[str, object]:
        return {"step": self.step.to_json(), "actions": [one.to_json() for one in self.actions]}

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """As a table with its headings."""
        rows: list[tuple[str, ...]] = [("", "predicted", "measured", "times as long", "of")]
        for one in (self.step, *self.actions):
            figures = seconds_text(one.predicted), seconds_text(one.measured), f"{one.ratio:.3g}"
            rows.append((one.what, *figures, str(one.count)))
        return rows

    def __str__(self) -> str:
        return "\n".join(table(self.rows))


def compare(simulated: Trace, measured: Trace) -> Comparison:
    """Of two traces of one plan: the same actions on the same ranks in the same order."""
    wanted, found = _orders(simulated.events), _orders(measured.events)
    if not found or not wanted:
        raise InvalidInput(
            "a trace has actions of a schedule",
            got="none in " + ("the simulated one" if found else "the measured one"),
            remedy="plan.trace(path), and pm.record(steps=3) before the steps",
        )
    if apart := _apart(simulated, measured):
        raise InvalidInput(
            "the traces that are compared are of one plan",
            got=apart,
            remedy="plan.trace(path) of the module's own plan: pm.plan.trace(path)",
        )
    times = [_times(simulated.events, step) for step in sorted({step for _, step in wanted})[:1]]
    times += [_times(measured.events, step) for step in sorted({step for _, step in found})]
    whole, after = (
        Pair(what, own[0], statistics.median(own[1:]), len(own) - 1)
        for what, own in zip(("a step", "after the last action"), zip(*times))
    )
    pairs = [after, *_pairs(simulated.events, measured.events)]
    pairs.sort(key=lambda one: -abs(one.measured - one.predicted) * one.count)
    return Comparison(whole, tuple(pairs))


def _apart(simulated: Trace, measured: Trace) -> str | None:
    """What shows that they are not of one plan. A large one is simulated for some ranks alone."""
    wanted, found = _orders(simulated.events), _orders(measured.events)
    for step in sorted({step for _, step in found}):
        for (rank, _), other in sorted(wanted.items()):
            one = found.get((rank, step), [])
            if one != other:
                return f"other actions on rank {rank}: {_first(one, other)}"
    if simulated.plan != measured.plan:
        return "the same actions of two plans, which differ in their layouts or model"
    return None


def _orders(events: Iterable[Event]) -> dict[tuple[int, int], list[str]]:
    """The actions of each rank and step, in order."""
    found = defaultdict(list)
    for event in sorted(events, key=lambda one: one.start):
        if event.track == ACTIONS:
            found[event.rank, int(event.about["step"])].append(event.name)
    return dict(found)


def _first(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = ((a, b) for a, b in zip([*one, "nothing"], [*other, "nothing"]) if a != b)
    got, wanted = next(pairs, ("more", "fewer"))
    return f"{got} where {wanted} was simulated"


def _times(events: Iterable[Event], step: int) -> tuple[float, float]:
    """The seconds of a step, and of them those after its last action."""
    own = [one for one in events if one.about.get("step", 0) == step]
    actions = [one for one in own if one.track == ACTIONS]
    end = max(one.end for one in own)
    return end - min(one.start for one in actions), end - max(one.end for one in actions)


def _pairs(simulated: Sequence[Event], measured: Sequence[Event]) -> list[Pair]:
    def by_kind(events: Iterable[Event]) -> dict[tuple[str, int], list[float]]:
        found = defaultdict(list)
        for one in events:
            if one.track == ACTIONS:
                key = str(one.about["kind"]), int(one.about["stage"])
                found[key].append(one.end - one.start)
        return found

    predicted, took = by_kind(simulated), by_kind(measured)
    return [
        Pair(
            f"{WORDS[kind]} of stage {stage}",
            statistics.median(predicted[kind, stage]),
            statistics.median(took[kind, stage]),
            len(took[kind, stage]),
        )
        for kind, stage in sorted(predicted.keys() & took.keys())
    ]
