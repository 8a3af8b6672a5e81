"""Compare a simulated and a measured trace of one plan: which predictions were off."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import KIND_NAMES
from autopar.report.trace import ACTIONS, Event, Trace
from autopar.text.tables import table
from autopar.text.units import seconds_text


@dataclass(frozen=True)
class TimePair:
    """The predicted seconds of something, and the median of its measurements."""

    what: str
    predicted: float
    measured: float
    count: int  # measurements

    @property
    def ratio(self) -> float:
        """The measured time divided by the predicted one."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class TraceComparison:
    """The times of a step and of its actions by kind and stage, the largest differences first."""

    step: TimePair
    actions: tuple[TimePair, ...]

    def to_json(self) -> dict[str, object]:
        return {"step": self.step.to_json(), "actions": [pair.to_json() for pair in self.actions]}

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The comparison as a table with its headings."""
        rows: list[tuple[str, ...]] = [("", "predicted", "measured", "times as long", "of")]
        for pair in (self.step, *self.actions):
            figures = seconds_text(pair.predicted), seconds_text(pair.measured), f"{pair.ratio:.3g}"
            rows.append((pair.what, *figures, str(pair.count)))
        return rows

    def __str__(self) -> str:
        return "\n".join(table(self.rows))


def compare(simulated: Trace, measured: Trace) -> TraceComparison:
    """Compare two traces of one plan, which must have the same actions in the same order."""
    simulated_orders, measured_orders = _orders(simulated.events), _orders(measured.events)
    if not measured_orders or not simulated_orders:
        raise InvalidInput(
            "a trace has actions of a schedule",
            got="none in " + ("the simulated one" if measured_orders else "the measured one"),
            remedy="plan.trace(path), and pm.record(steps=3) before the steps",
        )
    if apart := _difference(simulated, measured):
        raise InvalidInput(
            "the traces that are compared are of one plan",
            got=apart,
            remedy="plan.trace(path) of the module's own plan: pm.plan.trace(path)",
        )
    times = [
        _times(simulated.events, step)
        for step in sorted({step for _, step in simulated_orders})[:1]
    ]
    times += [
        _times(measured.events, step) for step in sorted({step for _, step in measured_orders})
    ]
    whole, after = (
        TimePair(what, seconds[0], statistics.median(seconds[1:]), len(seconds) - 1)
        for what, seconds in zip(("a step", "after the last action"), zip(*times))
    )
    pairs = [after, *_pairs(simulated.events, measured.events)]
    pairs.sort(key=lambda pair: -abs(pair.measured - pair.predicted) * pair.count)
    return TraceComparison(whole, tuple(pairs))


def _difference(simulated: Trace, measured: Trace) -> str | None:
    """Say why two traces are not of one plan, or return None.

    A large plan is simulated for some ranks only.
    """
    simulated_orders, measured_orders = _orders(simulated.events), _orders(measured.events)
    for step in sorted({step for _, step in measured_orders}):
        for (rank, _), other in sorted(simulated_orders.items()):
            order = measured_orders.get((rank, step), [])
            if order != other:
                return f"other actions on rank {rank}: {_first_difference(order, other)}"
    if simulated.plan != measured.plan:
        return "the same actions of two plans, which differ in their layouts or model"
    return None


def _orders(events: Iterable[Event]) -> dict[tuple[int, int], list[str]]:
    """Return the names of actions in order, by rank and step."""
    orders = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        if event.track == ACTIONS:
            orders[event.rank, int(event.args["step"])].append(event.name)
    return dict(orders)


def _first_difference(measured: Sequence[str], simulated: Sequence[str]) -> str:
    pairs = ((a, b) for a, b in zip([*measured, "nothing"], [*simulated, "nothing"]) if a != b)
    got, wanted = next(pairs, ("more", "fewer"))
    return f"{got} where {wanted} was simulated"


def _times(events: Iterable[Event], step: int) -> tuple[float, float]:
    """Return the seconds of a step, and those after its last action."""
    events_of_step = [event for event in events if event.args.get("step", 0) == step]
    actions = [event for event in events_of_step if event.track == ACTIONS]
    end = max(event.end for event in events_of_step)
    return end - min(event.start for event in actions), end - max(event.end for event in actions)


def _pairs(simulated: Sequence[Event], measured: Sequence[Event]) -> list[TimePair]:
    def by_kind(events: Iterable[Event]) -> dict[tuple[str, int], list[float]]:
        durations = defaultdict(list)
        for event in events:
            if event.track == ACTIONS:
                key = str(event.args["kind"]), int(event.args["stage"])
                durations[key].append(event.end - event.start)
        return durations

    predicted, took = by_kind(simulated), by_kind(measured)
    return [
        TimePair(
            f"{KIND_NAMES[kind]} of stage {stage}",
            statistics.median(predicted[kind, stage]),
            statistics.median(took[kind, stage]),
            len(took[kind, stage]),
        )
        for kind, stage in sorted(predicted.keys() & took.keys())
    ]
