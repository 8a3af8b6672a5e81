"""Comparison: a simulated and a measured trace of one plan, and which predictions were off."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import WORDS
from autopar.report.trace import ACTIONS, Event
from autopar.units import seconds_text, table


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
    """The step, then its kinds of actions by stage, those first that are most seconds off."""

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


def compare(simulated: Sequence[Event], measured: Sequence[Event]) -> Comparison:
    """Of two traces of one plan: the same actions on the same ranks in the same order."""
    wanted, found = _orders(simulated), _orders(measured)
    steps = {step for _, step in found}
    first = min((step for _, step in wanted), default=0)
    for rank, step in sorted(found):
        one, other = found[rank, step], wanted.get((rank, first))
        if other is not None and one != other:
            raise InvalidInput(
                "the traces that are compared are of one plan",
                got=f"other actions on rank {rank}: {_first(one, other)}",
                remedy="plan.trace(path) of the module's own plan: pm.plan.trace(path)",
            )
    if not found or not wanted:
        raise InvalidInput(
            "a trace has actions of a schedule",
            got="none in " + ("the simulated one" if found else "the measured one"),
            remedy="plan.trace(path), and pm.record(steps=3) before the steps",
        )
    length = max(one.end for one in simulated) - min(one.start for one in simulated)
    lengths = [_length(one for one in measured if one.about.get("step") == step) for step in steps]
    whole = Pair("a step", length, statistics.median(lengths), len(steps))
    return Comparison(whole, tuple(_pairs(simulated, measured)))


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


def _length(events: Iterable[Event]) -> float:
    own = [*events]
    return max(one.end for one in own) - min(one.start for one in own)


def _pairs(simulated: Sequence[Event], measured: Sequence[Event]) -> list[Pair]:
    def by_kind(events: Iterable[Event]) -> dict[tuple[str, int], list[float]]:
        found = defaultdict(list)
        for one in events:
            if one.track == ACTIONS:
                key = str(one.about["kind"]), int(one.about["stage"])
                found[key].append(one.end - one.start)
        return found

    predicted, took = by_kind(simulated), by_kind(measured)
    pairs = [
        Pair(
            f"{WORDS[kind]} of stage {stage}",
            statistics.median(predicted[kind, stage]),
            statistics.median(took[kind, stage]),
            len(took[kind, stage]),
        )
        for kind, stage in sorted(predicted.keys() & took.keys())
    ]
    return sorted(pairs, key=lambda one: -abs(one.measured - one.predicted) * one.count)
