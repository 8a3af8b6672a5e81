"""Trace: a step as Chrome and Perfetto show it, one file of events for all ranks.

Ranks are processes, and what they do at a time stands in their tracks: actions of the schedule, in
a plan's own trace also the calls inside of them, and sums of gradients; in a recording, gathers and
sums from their begin to their end. Times are microseconds from
the start of the first step. An action is called as schedules are written: `2F0` is the forward of
stage 2 on micro-batch 0.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autopar.base.files import write_file
from autopar.base.schema import Index, Mismatch, NotNegative
from autopar.base.schema import read as read_data
from autopar.candidates.candidate import Candidate
from autopar.errors import InvalidInput
from autopar.pipeline.running.movement_spans import MovementSpan
from autopar.pipeline.schedule import KINDS, Action, one_stage
from autopar.pipeline.simulation.timeline import UPDATES
from autopar.report.module_tree import ProgramCall, calls_of

# Tracks of a rank. Gathers and sums that run at the same time have tracks from MOVEMENTS on: on one
# track, events stand inside of one another or apart.
ACTIONS, INSIDE, SUMS, MOVEMENTS = range(4)
_TRACKS = {
    ACTIONS: "actions",
    INSIDE: "calls",
    SUMS: "sums of gradients",
    MOVEMENTS: "gathers and sums beside actions",
}
UNHIDDEN = "what nothing hides"  # until the end of a step, after its last action
_RANKS = 64  # of which each is shown; of more, one for each place of the pipeline


@dataclass(frozen=True)
class Event:
    """Something that a rank does; times in seconds."""

    rank: int
    name: str
    start: float
    end: float
    track: int = ACTIONS
    args: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        times = {"ts": self.start * 1e6, "dur": (self.end - self.start) * 1e6}
        place = {"pid": self.rank, "tid": self.track}
        return (
            {"name": self.name, "cat": _track_name(self.track), "ph": "X"}
            | times
            | place
            | ({"args": dict(self.args)})
        )


@dataclass(frozen=True)
class Trace:
    """The events of a plan's step, or of some steps of a module with that plan."""

    what: Literal["simulated", "measured"]
    plan: str  # its digest
    events: tuple[Event, ...]


def events_of(candidate: Candidate) -> list[Event]:
    """Return the events of the predicted step."""
    mesh, timeline = candidate.whole_mesh, candidate.timeline
    if timeline is None:
        events = [*_in_one_stage(candidate)]
    else:
        schedule = timeline.schedule
        events = [
            action_event(place, step=0, action=action, start=start, end=end)
            for place, order in enumerate(schedule.orders)
            for action, start, end in zip(order, timeline.starts[place], timeline.ends[place])
            if action.kind in KINDS
        ]
        events += [
            Event(place, sync.name, sync.start, sync.end, SUMS)
            for sync in timeline.synchronizations
            for place in sync.ranks
        ]
        events += [
            Event(event.rank, UPDATES, event.start, event.end, SUMS) for event in timeline.updates
        ]
    ranks = range(mesh.size)
    if mesh.size > _RANKS:
        ranks_by_place = {candidate.place_of(rank): rank for rank in reversed(ranks)}
        shown = sorted(ranks_by_place.values())
    else:
        shown = [*ranks]
    by_place: dict[int, list[Event]] = {}
    for event in events:
        by_place.setdefault(event.rank, []).append(event)
    return [
        Event(rank, event.name, event.start, event.end, event.track, event.args)
        for rank in shown
        for event in by_place.get(candidate.place_of(rank), ())
    ]


def action_event(rank: int, step: int, action: Action, start: float, end: float) -> Event:
    """Return the event of a schedule's action."""
    facts = {"step": step, "kind": action.kind, "stage": action.stage, "pipe": action.pipe}
    return Event(rank, str(action), start, end, ACTIONS, facts)


def movement_events(rank: int, step: int, spans: Iterable[MovementSpan]) -> Iterator[Event]:
    """Yield the events of gathers and sums that ran beside actions, on the fewest tracks."""
    free: list[float] = []  # by track, the end of its last event
    for span in sorted(spans, key=lambda span: span.start):
        track = next((at for at, end in enumerate(free) if end <= span.start), len(free))
        free[track:] = [span.end, *free[track + 1 :]]
        yield Event(rank, span.name, span.start, span.end, MOVEMENTS + track, {"step": step})


def _track_name(track: int) -> str:
    return _TRACKS[min(track, MOVEMENTS)]


def _in_one_stage(candidate: Candidate) -> Iterator[Event]:
    """Without a pipeline: forward and backward of each micro-batch, call by call, then sums."""
    calls = [(module, call) for module, call in calls_of(candidate) if call.seconds]
    costs = {node.name: candidate.prices.own(node) for node in candidate.rewritten.nodes}
    now = 0.0
    for action in one_stage(candidate.microbatches).orders[0]:
        start, order = now, calls if action.kind == "F" else calls[::-1]
        for module, call in order:
            cost = costs[call.name]
            seconds = cost.forward if action.kind == "F" else cost.backward
            if seconds:
                yield Event(0, call.operator, now, now + seconds, INSIDE, _call_facts(module, call))
                now += seconds
        yield action_event(0, 0, action, start, now)
    if (last := candidate.cost.seconds) > now:
        yield Event(0, UNHIDDEN, now, last, SUMS)


def _call_facts(module: str, call: ProgramCall) -> dict[str, Any]:
    facts: dict[str, Any] = {"module": module, "type": call.type, "line": call.source}
    if call.moved is not None:
        facts |= {"bytes": call.moved.bytes, "over": call.moved.axes, "back": call.moved.backward}
    return facts


@dataclass(frozen=True)
class _TraceRow:
    """An event, or a name of a track, as it is written."""

    name: str
    ph: Literal["X", "M"]
    pid: Index
    tid: Index
    args: Mapping[str, Any]
    ts: NotNegative = 0.0
    dur: NotNegative = 0.0
    cat: str = ""


@dataclass(frozen=True)
class _TraceHeader:
    """The header of a trace file."""

    format: Literal["autopar trace"]
    what: Literal["simulated", "measured"]
    plan: str


@dataclass(frozen=True)
class _TraceFile:
    rows: tuple[_TraceRow, ...] = field(metadata={"key": "traceEvents"})
    unit: str = field(metadata={"key": "displayTimeUnit"})
    of: _TraceHeader = field(metadata={"key": "otherData"})


@dataclass(frozen=True)
class _ActionArgs:
    """The arguments of an action's event."""

    step: Index
    kind: Literal["F", "B", "I", "W"]
    stage: Index
    pipe: Index


def write(path: str | Path, trace: Trace) -> None:
    """Write a file that Chrome, Perfetto and `read` take; packed where it ends with `.gz`."""
    ranks = sorted({event.rank for event in trace.events})
    tracks = sorted({(event.rank, event.track) for event in trace.events})
    named = [_named("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    named += [_named("thread_name", rank, track, _track_name(track)) for rank, track in tracks]
    data = {
        "traceEvents": [*named, *(event.to_json() for event in trace.events)],
        "displayTimeUnit": "ms",
        "otherData": {"format": "autopar trace", "what": trace.what, "plan": trace.plan},
    }
    text = json.dumps(data, allow_nan=False).encode()
    packed = gzip.compress(text) if str(path).endswith(".gz") else text
    write_file(path, packed, "the file of a trace")


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def read(path: str | Path, what: str) -> Trace:
    """Read a trace that `write` wrote; `what` is "simulated" or "measured"."""
    rule = "a trace is a file that autopar wrote"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise InvalidInput(rule, got=got, remedy="give the path of a trace") from None
    try:
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        file: _TraceFile = read_data(_TraceFile, content)
        events = tuple(_event(row) for row in file.rows if row.ph == "X")
    except (ValueError, EOFError, RecursionError, OSError, zlib.error, Mismatch) as error:
        raise InvalidInput(
            rule,
            got=f"{path}, which holds something else: {error}",
            remedy="plan.trace(path), or record().save()",
        ) from None
    if file.of.what == what:
        return Trace(file.of.what, file.of.plan, events)
    raise InvalidInput(
        f"a {what} trace is wanted here",
        got=f"{path}, which is {file.of.what}",
        remedy="the simulated one stands first, the measured one second",
    )


def _event(row: _TraceRow) -> Event:
    if row.tid == ACTIONS:
        read_data(_ActionArgs, row.args)
    end = (row.ts + row.dur) / 1e6
    return Event(row.pid, row.name, row.ts / 1e6, end, row.tid, row.args)
