"""Charts of a run beside its prediction: losses, step times, the recorded schedule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, groupby
from typing import Protocol

import torch

from autopar.candidates.candidate import Candidate
from autopar.cost.unsharded_work import model_flops
from autopar.errors import InvalidInput
from autopar.pipeline.simulation.gantt import Gantt
from autopar.pipeline.sums import without_sums
from autopar.report.trace import ACTIONS, MOVEMENTS, Event
from autopar.strategies.node_info import info
from autopar.tensor_type import DTYPE_NAMES
from autopar.text.drawing import WIDE, Axis, Drawing, legend_places
from autopar.text.units import counted, scaled, seconds_text, share_text

_HEIGHT, _LEFT, _BELOW = 180.0, 76.0, 22.0
_KINDS = tuple(f"series{number}" for number in range(6))


@dataclass(frozen=True)
class TrainingRun:
    """The measurements of some steps of a training."""

    losses: Sequence[float]
    seconds: Sequence[float]  # of each step
    predicted: float  # seconds of a step
    tokens: int = 0  # of a step
    events: Sequence[Event] = ()  # of a recording of some of them
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)  # losses of other runs

    def __post_init__(self) -> None:
        for seconds in (*self.seconds, self.predicted):
            if not 0 <= seconds < math.inf:
                raise InvalidInput(
                    "the seconds of a step are a number, 0 or more",
                    got=f"{seconds}",
                    remedy="take the difference of two time.perf_counter()",
                )


class StepFiguresLike(Protocol):
    """The figures of one step, as `pm.on_step` reports them."""

    @property
    def loss(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def tokens(self) -> int | None: ...


class RecordedSteps(Protocol):
    """A recording of steps, as `pm.record` returns it."""

    figures: Sequence[StepFiguresLike]

    def events(self) -> Sequence[Event]: ...


def read_run(
    given: TrainingRun | RecordedSteps | Sequence[StepFiguresLike], predicted: float
) -> TrainingRun:
    """Read a run from a recording or from the figures of steps."""
    if isinstance(given, TrainingRun):
        return given
    events = given.events() if hasattr(given, "events") else ()
    figures = getattr(given, "figures", given)
    if not isinstance(figures, Sequence) or not all(hasattr(step, "loss") for step in figures):
        raise InvalidInput(
            "a run is a recording, or the figures of its steps",
            got=f"a {type(given).__name__}",
            remedy="run=pm.record(steps=3); or steps = [], pm.on_step(steps.append), run=steps",
        )
    tokens = figures[-1].tokens if len(figures) else None
    losses, seconds = [step.loss for step in figures], [step.seconds for step in figures]
    return TrainingRun(losses, seconds, predicted, tokens or 0, events)


@dataclass(frozen=True)
class Section:
    """A picture, at the width that is asked for, with a heading and a sentence."""

    title: str
    picture: Callable[[float], Drawing]
    words: str


def run_sections(run: TrainingRun, candidate: Candidate) -> list[Section]:
    """Draw the charts for which there is data."""
    charts = []
    if any(map(len, [run.losses, *run.others.values()])):
        charts.append(_losses(run))
    if len(run.seconds):
        charts.append(_times(run, candidate))
    return charts


def _losses(run: TrainingRun) -> Section:
    losses = run.losses
    words = (
        f"From {losses[0]:.4g} to {losses[-1]:.4g} in {counted(len(losses), 'step')}."
        if len(losses)
        else ""
    )
    for name, other in {"this run": losses, **run.others}.items():
        if odd := [at for at, loss in enumerate(other, 1) if not math.isfinite(loss)]:
            words += f" The loss of {name} is not finite in {len(odd)}, the first is step {odd[0]}."
    for name, other in run.others.items():
        apart = [abs(a - b) for a, b in zip(losses, other) if math.isfinite(a) and math.isfinite(b)]
        if apart:
            words += f" The largest difference from {name} is {max(apart):.1e}."
    series = {"this run": losses, **run.others}
    return Section("Loss", partial(draw_lines, series, "loss", "{:.3g}".format), words.strip())


def _times(run: TrainingRun, candidate: Candidate) -> Section:
    usual = statistics.median(run.seconds)
    words = f"A step takes {seconds_text(usual)} (median)"
    if usual > 0:
        words += f", {scaled(run.tokens / usual, 'tokens/s', 3)}" if run.tokens else ""
        words += f", {share_text(_used(candidate, usual))} of the FLOP/s of its devices (MFU)"
    words += f"; predicted were {seconds_text(run.predicted)}"
    if usual > 0 and run.predicted > 0:
        words += f": it takes {usual / run.predicted:.2g} times as long as predicted"
    times = {"measured": run.seconds, "predicted": [run.predicted] * len(run.seconds)}
    return Section(
        "Time of a step", partial(draw_lines, times, "seconds of a step", seconds_text), f"{words}."
    )


def _used(candidate: Candidate, seconds: float) -> float:
    """Return the model FLOP/s utilisation: the share of peak FLOP/s that the model needs."""
    batches = candidate.batches
    original = candidate.captured if batches is None else batches.whole
    half = None if candidate.precision is None else candidate.precision.compute
    dtype = half or next((info(n).val.dtype for n in original.operators), torch.float32)
    most = candidate.cluster.device.flops
    rate = most.get(DTYPE_NAMES.get(dtype, "f32"), most["f32"]) * candidate.whole_mesh.size
    return model_flops(original) / (seconds * rate)


def measured_gantt(events: Sequence[Event], candidate: Candidate) -> Gantt | None:
    """Draw what the first rank of each stage did in the last recorded step.

    Returns None without a pipeline, or if a stage was not recorded.
    """
    actions = [event for event in events if event.track == ACTIONS]
    if candidate.pipelining is None or not actions:
        return None
    schedule = without_sums(candidate.pipelining.schedule)  # they are drawn from begin to end
    last = max(event.args["step"] for event in actions)
    last_actions = sorted(
        (event for event in actions if event.args["step"] == last), key=lambda event: event.start
    )
    first = last_actions[0].start
    ranks: dict[int, int] = {}
    for event in sorted(last_actions, key=lambda event: event.rank):
        ranks.setdefault(candidate.place_of(event.rank), event.rank)
    if len(ranks) < schedule.ranks:
        return None
    rows = [
        [event for event in last_actions if event.rank == ranks[place]]
        for place in range(schedule.ranks)
    ]
    starts = [[event.start - first for event in row] for row in rows]
    ends = [[event.end - first for event in row] for row in rows]
    places = {rank: place for place, rank in ranks.items()}
    movements = [
        (event.name, (places[event.rank],), event.start - first, event.end - first)
        for event in events
        if event.track >= MOVEMENTS and event.args["step"] == last and event.rank in places
    ]
    return Gantt(schedule, starts, ends, movements, seconds_text)


def draw_lines(
    series: Mapping[str, Sequence[float]],
    what: str,
    unit: Callable[[float], str],
    width: float = WIDE,
) -> Drawing:
    """Draw a line for each series of values by step; values that are not finite are left out."""
    values = [value for line in series.values() for value in line if math.isfinite(value)]
    count = max(map(len, series.values()))
    legend = legend_places([*series], _LEFT, width, sign=26.0)
    top = legend[-1][2] + 10
    picture = Drawing(
        width, top + _HEIGHT, f"{what} over {counted(count, 'step')}: {', '.join(series)}"
    )
    across = Axis(1.0, float(max(count, 2)), _LEFT, width - 12)
    up = Axis(min([0.0, *values]), max([0.0, *values]) * 1.05, top + _HEIGHT - _BELOW, top)
    for value, words in up.labels(4, unit):
        picture.line([(_LEFT, up.at(value)), (width - 12, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, words, "end")
    for value, words in across.labels(8, "{:g}".format, room=4.0):
        if value == int(value):
            picture.text(across.at(value), picture.height - 6, words, "middle")
    for (name, x, y), values_of_line, kind in zip(legend, series.values(), cycle(_KINDS)):
        for points in _stretches(values_of_line):
            picture.line([(across.at(n), up.at(value)) for n, value in points], kind)
            if len(points) == 1:
                picture.dot(across.at(points[0][0]), up.at(points[0][1]), 2.5, f"{kind} point")
        picture.line([(x, y), (x + 20, y)], kind)
        picture.text(x + 26, y + 4, name)
    return picture


def _stretches(values: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """Yield runs of finite values, with their steps."""
    for is_finite, group in groupby(enumerate(values, 1), lambda item: math.isfinite(item[1])):
        if is_finite:
            yield [*group]
