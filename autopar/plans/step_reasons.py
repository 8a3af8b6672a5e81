"""The reasons why a step runs in this many stages, by this schedule, with states in these places.

    print(plan.explain("stages"))        # or "schedule", "microbatches", "mesh", "states", ...

Shown is the best of the weighed ways with each other decision, all else free, and where it loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.base.schema import write
from autopar.candidates.alternative import Alternative
from autopar.candidates.trial import measured
from autopar.defaults import DECISIONS
from autopar.pipeline.schedule_labels import schedule_words
from autopar.plans.next_mesh import next_mesh
from autopar.plans.plan_value import PlanValue
from autopar.report.weighed_plans import left_out_words, rows_of, rows_of_meshes
from autopar.search.search_report import ConsideredMesh
from autopar.text.tables import stacked_table, table, wrap_line
from autopar.text.units import bytes_text, change_text, counted, seconds_text

_IN_WORDS = 3  # of those that lose
_LISTED = 24
_SAME = 1e-9  # relative
_AS_FAST = "is as fast"
_SIMPLER = "what is more complex has to gain 1%, and 10% if it keeps something on the host"


def _depth(way: Alternative) -> str:
    return f"{counted(way.mesh[way.axis], 'rank')} deep" if way.axis else "no pipeline"


def _schedule(way: Alternative) -> str:
    return schedule_words(way.schedule, dict(way.options)) if way.schedule else "no pipeline"


def _inside(way: Alternative) -> str:
    if not way.axis:
        return str(way.mesh)
    stages = counted(way.mesh[way.axis], "stage")
    return f"{way.mesh.without(way.axis)} in each of {stages}"


# The value that an alternative has for each decision about the whole step.
VALUE_OF: Mapping[str, Callable[[Alternative], str]] = {
    "stages": _depth,
    "schedule": _schedule,
    "microbatches": lambda way: counted(way.microbatches, "micro-batch"),
    "mesh": _inside,
    "states": lambda way: str(way.states),
    "recompute": lambda way: way.recompute or "nothing",
}
assert (*VALUE_OF,) == DECISIONS


# Values that are left only where memory is short.
_LEAST = {
    ("states", "whole"): "cut ones are looked at where memory is short",
    ("recompute", "nothing"): "nothing is computed twice",
}

_OF_A_LOSS = ("stages", "schedule", "microbatches")


@dataclass(frozen=True)
class WeighedValue:
    """The best way with one decision."""

    value: str
    best: Alternative
    count: int  # ways with it that were weighed


@dataclass(frozen=True)
class WayExplanation:
    """Why one decision about the whole step is what it is."""

    name: str
    chosen: str
    way: Alternative  # that was taken
    others: tuple[WeighedValue, ...]  # those that fit before others, the fastest first
    limit: float  # bytes of each device
    left_out: Mapping[str, int]  # how many bounds ruled out, of each kind, or a guess
    searched: bool  # not asked for by name
    meshes: tuple[ConsideredMesh, ...] = ()  # that the search for layouts looked at
    is_cut_short: bool = False  # by time, or Ctrl-C
    has_loss: bool = True  # stages and micro-batches need it
    fastest: float = math.inf  # seconds, of all that was weighed and fits
    # Measured seconds of those that were run, by how they run: they decided.
    ran: Mapping[str, float] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason in a sentence that the chosen value won."""
        first, *rest = self._reason()
        return first + (f": {'; '.join(rest)}" if rest else "")

    def _reason(self) -> list[str]:
        """Return the reason in parts."""
        if not self.others:
            return [self._alone()]
        first = self.others[0]
        if not first.best.fits:
            return [f"nothing else that was built fits into {bytes_text(self.limit)}"]
        takes, *rest = self._differences(first.best)
        rest += ["of equals the first that was found is taken"] if takes == _AS_FAST else []
        is_faster = first.best.seconds < self.way.seconds * (1 - _SAME)
        rest = [_SIMPLER, *rest] if is_faster and not self.ran else rest
        return [f"the next, {first.value}, {takes}", *rest]

    def _alone(self) -> str:
        """Return why no other value was weighed."""
        if least := _LEAST.get((self.name, self.chosen)):
            held = f"{bytes_text(self.way.memory)} of {bytes_text(self.limit)}"
            return f"nothing else was weighed: {least}, and {held} are held with it"
        if not self.has_loss and self.name in _OF_A_LOSS:
            needed = "stages and micro-batches need the loss, which the model does not return"
            return f"nothing else was weighed: {needed}"
        if not self.searched:
            return "it was asked for: nothing was searched"
        if self.is_cut_short:
            return "nothing else was weighed before the search ended early"
        if self.left_out:
            why = "cannot be faster by a bound, or is not likely to be"
            return f"nothing else was weighed: it was asked for, or all else {why}"
        return "nothing else was weighed: it was asked for, or there is no other"

    def against(self, other: Alternative) -> str:
        """Return in words what another way takes compared with the chosen one, and why."""
        first, *rest = self._differences(other)
        return first + (f": {'; '.join(rest)}" if rest else "")

    def _differences(self, other: Alternative) -> list[str]:
        more = _more(self.way.seconds, other.seconds)
        texts = [f"takes {more}" if more else _AS_FAST]
        if (ran := self.ran.get(self.way.how)) and (other_ran := self.ran.get(other.how)):
            texts = [
                f"took {_more(ran, other_ran) or 'as long'} when both were run",
                f"was predicted to take {more or 'as long'}",
            ]
        texts += [f"{what} {parts}" for what, parts in self._changes(other).items() if parts]
        held, held_now = bytes_text(other.memory), bytes_text(self.way.memory)
        if not other.fits:
            texts.append(f"but holds {held} of {bytes_text(self.limit)}")
        elif held != held_now:
            texts.append(f"holds {held}, not {held_now}")
        return texts

    @property
    def _too_large(self) -> list[WeighedValue]:
        """The fastest value that would be faster, if it had room."""
        without_room = (value for value in self.others[_IN_WORDS:] if not value.best.fits)
        return [value for value in without_room if value.best.seconds < self.way.seconds][:1]

    def _changes(self, other: Alternative) -> dict[str, str]:
        """Return the parts of a step in which another way loses, and wins, the largest first."""
        before, after = self.way.cost.parts, other.cost.parts
        changes = {name: after[name] - before[name] for name in before}
        shown = [name for name in changes if abs(changes[name]) > 1e-3 * self.way.seconds]
        shown.sort(key=lambda name: -abs(changes[name]))
        words = {name: f"{name} {seconds_text(abs(changes[name]))}" for name in shown}
        return {
            "loses": ", ".join(words[name] for name in shown if changes[name] > 0),
            "wins": ", ".join(words[name] for name in shown if changes[name] < 0),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all weighed values as plain data."""
        others = [
            {"value": o.value, "count": o.count, "parts": o.best.cost.parts, **write(o.best)}
            for o in self.others
        ]
        way = {"parts": self.way.cost.parts, **write(self.way)}
        words = {"name": self.name, "chosen": self.chosen, "why": self.why}
        more = {"left_out": dict(self.left_out), "meshes": write(self.meshes)}
        return {**words, "way": way, "others": others, **more}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.chosen}", *self._fastest(), *_lines(self._reason())]
        if self.is_cut_short:
            lines.append("  the search ended early: what was not weighed may be better")
        for other in (*self.others[1:_IN_WORDS], *self._too_large):
            takes, *rest = self._differences(other.best)
            lines += _lines([f"{other.value} {takes}", *rest])
        if self.others:
            lines += ["", *stacked_table(self._rows(), _LISTED)]
        if self.meshes:
            inner = self.way.mesh.without(self.way.axis) if self.way.axis else self.way.mesh
            lines += ["", "  meshes by the search for layouts (* taken)"]
            lines += table(rows_of_meshes(self.meshes, inner), _LISTED)
        if self.left_out:
            words = f"  ruled out by bounds, unasked: {left_out_words(self.left_out)}"
            lines += ["", *wrap_line(words)]
        return "\n".join(lines)

    def _fastest(self) -> list[str]:
        """Return a line with the seconds of the chosen way, and of the fastest if it is another."""
        if ran := self.ran.get(self.way.how):
            return [f"  the fastest that was run: {seconds_text(ran)} a step when it was measured"]
        fitting = [other.best.seconds for other in self.others if other.best.fits]
        if not fitting:
            return []
        fastest, words = min(self.fastest, *fitting), "the fastest that fits"
        if fastest < self.way.seconds * (1 - _SAME):
            words = f"simpler than the fastest that fits, which takes {seconds_text(fastest)}"
        held = f"{bytes_text(self.way.memory)} of {bytes_text(self.limit)}"
        return wrap_line(f"  {words}: {seconds_text(self.way.seconds)} a step, {held}")

    def _rows(self) -> list[tuple[str, ...]]:
        values = [WeighedValue(self.chosen, self.way, 1), *self.others]
        widest = max(len(weighed.value) for weighed in values)
        names = [f"{weighed.value:<{widest}}  {self._rest(weighed.best)}" for weighed in values]
        return rows_of([weighed.best for weighed in values], names, self.way)

    def _rest(self, way: Alternative) -> str:
        """Return in words how a way runs, apart from the decision that is explained."""
        mesh = "" if self.name == "mesh" else str(way.mesh)
        return ": ".join(part for part in (mesh, way.description(self.name)) if part)


def explain_way(plan: PlanValue, name: str) -> WayExplanation:
    """The explanation of one of the `DECISIONS`."""
    limit = plan.cluster.device.usable_memory if plan.limit is None else plan.limit
    value_of, way = VALUE_OF[name], plan.alternative(limit)
    weighed = plan.alternatives
    if name == "mesh" and (other_mesh := next_mesh(plan, limit)) is not None:
        weighed = (*weighed, other_mesh)
    by_value: dict[str, list[Alternative]] = {}
    for alternative in weighed:
        by_value.setdefault(value_of(alternative), []).append(alternative)
    chosen = value_of(way)
    others = [
        WeighedValue(value, _best(ways), len(ways))
        for value, ways in by_value.items()
        if value != chosen
    ]
    others.sort(key=lambda other: (not other.best.fits, other.best.seconds))
    considered = () if plan.search is None or name != "mesh" else plan.search.considered
    return WayExplanation(
        name,
        chosen,
        way,
        tuple(others),
        limit,
        plan.left_out,
        searched=plan.search is not None,
        meshes=tuple(considered),
        is_cut_short=plan.search is not None and plan.search.interrupted,
        has_loss=plan.loss is not None,
        fastest=min((other.seconds for other in weighed if other.fits), default=math.inf),
        ran=measured(plan.trials),
    )


def _more(before: float, after: float) -> str:
    """Return in words by how much a time grows or shrinks; empty for no change."""
    more = after - before
    if abs(more) <= _SAME * before:
        return ""
    word = "more" if more > 0 else "less"
    return f"{seconds_text(abs(more))} {word} ({change_text(before, after)})"


def _best(ways: Sequence[Alternative]) -> Alternative:
    return min(ways, key=lambda way: (not way.fits, way.seconds))


def _lines(texts: Sequence[str]) -> list[str]:
    """Return a reason and its parts as lines, one below the other."""
    first, *rest = texts
    return [*wrap_line(f"  {first}"), *(line for part in rest for line in wrap_line(f"    {part}"))]
