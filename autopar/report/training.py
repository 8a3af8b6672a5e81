"""Training: how a run went, as pictures beside what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.cost.whole_work import model_flops
from autopar.drawing import Axis, Drawing
from autopar.layout import DTYPE_NAMES
from autopar.pipeline.gantt import Gantt
from autopar.planner.candidate import Candidate
from autopar.report.trace import ACTIONS, Event
from autopar.strategies.node_info import info
from autopar.units import scaled, seconds_text, share_text

_WIDTH, _HEIGHT, _LEFT, _BELOW = 960.0, 200.0, 76.0, 22.0
_KINDS = ("first", "second", "third")


@dataclass(frozen=True)
class Run:
    """What was measured of some steps."""

    losses: Sequence[float]
    seconds: Sequence[float]  # of each step
    predicted: float  # seconds of a step
    tokens: int = 0  # of a step
    events: Sequence[Event] = ()  # of a recording of some of them
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)  # losses of other runs


@dataclass(frozen=True)
class Section:
    """A picture with a heading and a sentence."""

    title: str
    picture: Drawing
    words: str


def sections(run: Run, candidate: Candidate) -> list[Section]:
    """Losses, times, and the schedule as it was carried out."""
    losses = {"this run": run.losses, **run.others}
    apart = [max(abs(a - b) for a, b in zip(run.losses, other)) for other in run.others.values()]
    words = f"From {run.losses[0]:.4g} to {run.losses[-1]:.4g} in {len(run.losses)} steps."
    for name, most in zip(run.others, apart):
        words += f" The largest difference from {name} is {most:.1e}."
    found = [Section("Loss", lines(losses, "loss", "{:.3g}".format), words)]
    usual = statistics.median(run.seconds)
    rate = f", {scaled(run.tokens / usual, 'tokens/s', 3)}" if run.tokens else ""
    rate += f", {share_text(_used(candidate, usual))} of the FLOP/s of its devices (MFU)"
    said = (
        f"A step takes {seconds_text(usual)} (median){rate}; predicted were "
        f"{seconds_text(run.predicted)}, {usual / run.predicted:.2g} times less."
    )
    if usual < run.predicted:
        said = said.replace(
            f"{usual / run.predicted:.2g} times less", f"{run.predicted / usual:.2g} times more"
        )
    times = {"measured": run.seconds, "predicted": [run.predicted] * len(run.seconds)}
    found.append(Section("Time of a step", lines(times, "seconds of a step", seconds_text), said))
    if run.events and candidate.pipelining is not None:
        words = "The schedule of the last step that was recorded; what was predicted is below."
        found.append(Section("Pipeline, measured", _measured(run.events, candidate), words))
    return found


def _used(candidate: Candidate, seconds: float) -> float:
    """Which part of what the devices could compute in the dtype of the program the model needs."""
    batches = candidate.batches
    original = candidate.captured if batches is None else batches.whole
    half = None if candidate.precision is None else candidate.precision.compute
    dtype = half or next((info(n).val.dtype for n in original.operators), torch.float32)
    most = candidate.cluster.device.flops
    rate = most.get(DTYPE_NAMES.get(dtype, "f32"), most["f32"]) * candidate.whole_mesh.size
    return model_flops(original) / (seconds * rate)


def _measured(events: Sequence[Event], candidate: Candidate) -> Drawing:
    """What the first rank at each place of the pipeline did in the last step."""
    assert candidate.pipelining is not None
    made, actions = candidate.pipelining.schedule, [o for o in events if o.track == ACTIONS]
    last = max(one.about["step"] for one in actions)
    own = sorted((one for one in actions if one.about["step"] == last), key=lambda one: one.start)
    first = own[0].start
    ranks: dict[int, int] = {}
    for event in sorted(own, key=lambda one: one.rank):
        ranks.setdefault(candidate.place_of(event.rank), event.rank)
    rows = [[one for one in own if one.rank == ranks[place]] for place in range(made.ranks)]
    starts = [[one.start - first for one in row] for row in rows]
    ends = [[one.end - first for one in row] for row in rows]
    return Gantt(made, starts, ends, (), seconds_text).drawn()


def lines(series: Mapping[str, Sequence[float]], what: str, unit: object) -> Drawing:
    """Values of steps, a line for each series."""
    assert callable(unit)
    values = [value for one in series.values() for value in one]
    count = max(map(len, series.values()))
    picture = Drawing(_WIDTH, _HEIGHT, f"{what} over {count} steps: {', '.join(series)}")
    across = Axis(1.0, float(max(count, 2)), _LEFT, _WIDTH - 12)
    up = Axis(min(0.0, *values), max(values) * 1.05, _HEIGHT - _BELOW, 24)
    for value in up.ticks(4):
        picture.line([(_LEFT, up.at(value)), (_WIDTH - 12, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, unit(value), "end")
    for value in across.ticks(8):
        if value == int(value):
            picture.text(across.at(value), _HEIGHT - 6, f"{value:g}", "middle")
    x = _LEFT
    for (name, own), kind in zip(series.items(), _KINDS):
        points = [(across.at(n), up.at(value)) for n, value in enumerate(own, 1)]
        picture.line(points, kind)
        picture.line([(x, 10), (x + 20, 10)], kind)
        picture.text(x + 26, 14, name)
        x += 44 + 6.2 * len(name)
    return picture
