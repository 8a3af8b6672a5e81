"""Trace: a step as Chrome and Perfetto show it, one file of events for all ranks.

Ranks are processes, and what they do at a time stands in their tracks: actions of the schedule, in
a plan's own trace also the calls inside of them, and sums of gradients. Times are microseconds from
the start of the first step. An action is called as schedules are written: `2F0` is the forward of
stage 2 on micro-batch 0.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import InvalidInput, written
from autopar.pipeline.schedule import Action, one_stage
from autopar.planner.candidate import Candidate
from autopar.report.model import Call, calls_of

FORMAT = "autopar trace"
ACTIONS, INSIDE, SUMS = range(3)  # tracks of a rank
_TRACKS = {ACTIONS: "actions", INSIDE: "calls", SUMS: "sums of gradients"}
_RANKS = 64  # of which each is shown; of more, one for each place of the pipeline


@dataclass(frozen=True)
class Event:
    """Something that a rank does; times in seconds."""

    rank: int
    name: str
    start: float
    end: float
    track: int = ACTIONS
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        times = {"ts": self.start * 1e6, "dur": (self.end - self.start) * 1e6}
        place = {"pid": self.rank, "tid": self.track}
        return (
            {"name": self.name, "cat": _TRACKS[self.track], "ph": "X"}
            | times
            | place
            | ({"args": dict(self.about)})
        )


def events_of(candidate: Candidate) -> list[Event]:
    """Those of the predicted step."""
    mesh, timeline = candidate.whole_mesh, candidate.timeline
    if timeline is None:
        found = [*_in_one_stage(candidate)]
    else:
        made = timeline.schedule
        found = [
            action_event(place, step=0, action=action, start=start, end=end)
            for place, order in enumerate(made.orders)
            for action, start, end in zip(order, timeline.starts[place], timeline.ends[place])
        ]
        found += [
            Event(place, f"stage {sync.stage}", sync.start, sync.end, SUMS)
            for sync in timeline.synchronizations
            for place in sync.ranks
        ]
    ranks = range(mesh.size)
    if mesh.size > _RANKS:
        ranks_by_place = {candidate.place_of(rank): rank for rank in reversed(ranks)}
        shown = sorted(ranks_by_place.values())
    else:
        shown = [*ranks]
    by_place: dict[int, list[Event]] = {}
    for event in found:
        by_place.setdefault(event.rank, []).append(event)
    return [
        Event(rank, one.name, one.start, one.end, one.track, one.about)
        for rank in shown
        for one in by_place.get(candidate.place_of(rank), ())
    ]


def action_event(rank: int, step: int, action: Action, start: float, end: float) -> Event:
    """An action of a schedule."""
    about = {"step": step, "kind": action.kind, "stage": action.stage, "pipe": action.pipe}
    return Event(rank, str(action), start, end, ACTIONS, about)


def _in_one_stage(candidate: Candidate) -> Iterator[Event]:
    """Without a pipeline: forward and backward of each micro-batch, call by call, then sums."""
    calls = [(module, call) for module, call in calls_of(candidate) if call.seconds]
    own = {node.name: candidate.prices.own(node) for node in candidate.rewritten.nodes}
    now = 0.0
    for action in one_stage(candidate.microbatches).orders[0]:
        start, order = now, calls if action.kind == "F" else calls[::-1]
        for module, call in order:
            cost = own[call.name]
            seconds = cost.forward if action.kind == "F" else cost.backward
            if seconds:
                yield Event(0, call.operator, now, now + seconds, INSIDE, _about(module, call))
                now += seconds
        yield action_event(0, 0, action, start, now)
    if (last := candidate.cost.seconds) > now:
        yield Event(0, "what nothing hides", now, last, SUMS)


def _about(module: str, call: Call) -> dict[str, Any]:
    about: dict[str, Any] = {"module": module, "type": call.type, "line": call.source}
    if call.moved is not None:
        about |= {"bytes": call.moved.bytes, "over": call.moved.axes, "back": call.moved.backward}
    return about


def write(path: str | Path, events: Sequence[Event], what: str) -> None:
    """Write a file that Chrome, Perfetto and `read` take; packed where it ends with `.gz`."""
    ranks = sorted({event.rank for event in events})
    tracks = sorted({(event.rank, event.track) for event in events})
    named = [_named("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    named += [_named("thread_name", rank, track, _TRACKS[track]) for rank, track in tracks]
    data = {
        "traceEvents": [*named, *(event.to_json() for event in events)],
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "what": what},
    }
    text = json.dumps(data).encode()
    packed = gzip.compress(text) if str(path).endswith(".gz") else text
    written(path, packed, "the file of a trace")


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def read(path: str | Path, what: str) -> list[Event]:
    """What `write` wrote of that kind, simulated or measured."""
    rule = "a trace is a file that autopar wrote"
    try:
        data = Path(path).read_bytes()
        made = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if made["otherData"]["format"] != FORMAT:
            raise KeyError
        found = [
            Event(
                one["pid"],
                one["name"],
                one["ts"] / 1e6,
                (one["ts"] + one["dur"]) / 1e6,
                one["tid"],
                one.get("args", {}),
            )
            for one in made["traceEvents"]
            if one["ph"] == "X"
        ]
        kind = str(made["otherData"]["what"])
    except OSError as error:
        got, remedy = f"{path}: {error.strerror}", "give the path of a trace"
    except (ValueError, KeyError, TypeError, EOFError, AttributeError):
        got, remedy = f"{path}, which holds something else", "plan.trace(path), or record().save()"
    else:
        if kind == what:
            return found
        rule, got = f"a {what} trace is wanted here", f"{path}, which is {kind}"
        remedy = "the simulated one stands first, the measured one second"
    raise InvalidInput(rule, got=got, remedy=remedy)
