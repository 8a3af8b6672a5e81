"""Ways: why a step runs in this many stages, by this schedule, with states in these places.

    print(plan.explain("stages"))        # or "schedule", "microbatches", "mesh", "states", ...

Of what was weighed, the best with each other decision, all else free, and where it loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.pipeline.words import schedule_words
from autopar.plan.value import PlanValue
from autopar.planner.candidate import Alternative
from autopar.report.weighed import left_out_words, parts_of
from autopar.schema import write
from autopar.search.auto import Considered
from autopar.units import bytes_text, change_text, counted, listed, seconds_text, table

_IN_WORDS = 3  # of those that lose
_LISTED = 24
_SAME = 1e-9  # relative


def _depth(one: Alternative) -> str:
    return f"{counted(one.mesh[one.axis], 'rank')} deep" if one.axis else "no pipeline"


def _schedule(one: Alternative) -> str:
    return schedule_words(one.schedule, dict(one.options)) if one.schedule else "no pipeline"


def _inside(one: Alternative) -> str:
    return str(one.mesh.without(one.axis) if one.axis else one.mesh)


# What is explained of a whole plan, and what an alternative has for it.
QUESTIONS: Mapping[str, Callable[[Alternative], str]] = {
    "stages": _depth,
    "schedule": _schedule,
    "microbatches": lambda one: str(one.microbatches),
    "mesh": _inside,
    "states": lambda one: str(one.states),
    "recompute": lambda one: one.recompute or "nothing",
}


# What is left only where memory is short.
_LEAST = {
    ("states", "whole"): "no other setting moves less",
    ("recompute", "nothing"): "nothing is computed twice",
}


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
    left_out: Mapping[str, int]  # how many bounds ruled out, of each kind
    searched: bool  # not asked for by name
    meshes: tuple[Considered, ...] = ()  # that the search for layouts looked at

    @property
    def why(self) -> str:
        """Why it was chosen, in a sentence."""
        if not self.others:
            if least := _LEAST.get((self.name, self.chosen)):
                held = f"{bytes_text(self.way.memory)} of {bytes_text(self.limit)}"
                return f"nothing else was weighed: {least}, and {held} are held with it"
            if not self.searched:
                return "it was asked for: nothing was searched"
            if self.left_out:
                return "nothing else was weighed: it was asked for, or by a bound cannot be faster"
            return "nothing else was weighed: it was asked for, or there is no other"
        first = self.others[0]
        if not first.best.fits:
            return f"nothing else fits into {bytes_text(self.limit)}"
        return f"the next, {first.value}, {self.against(first.best)}"

    def against(self, other: Alternative) -> str:
        """What another way takes beside the one that was chosen, and where it loses and wins."""
        more = other.seconds - self.way.seconds
        if abs(more) <= _SAME * self.way.seconds:
            words = "is as fast"
        else:
            words = f"takes {seconds_text(abs(more))} {'more' if more > 0 else 'less'}"
            words += f" ({change_text(self.way.seconds, other.seconds)})"
        if moved := self._changes(other):
            words += f": {moved}"
        if not other.fits:
            words += f"; but holds {bytes_text(other.memory)} of {bytes_text(self.limit)}"
        return words

    @property
    def _too_large(self) -> list[WeighedValue]:
        """The fastest that would be faster, if it had room."""
        left = (one for one in self.others[_IN_WORDS:] if not one.best.fits)
        return [one for one in left if one.best.seconds < self.way.seconds][:1]

    def _changes(self, other: Alternative) -> str:
        """The parts of a step that differ, those that weigh most first."""
        before, after = self.way.cost.parts, other.cost.parts
        found = {name: after[name] - before[name] for name in before}
        told = [name for name in found if abs(found[name]) > 1e-3 * self.way.seconds]
        told.sort(key=lambda name: -abs(found[name]))
        return ", ".join(f"{name} {_signed(found[name])}" for name in told)

    def to_json(self) -> dict[str, Any]:
        """All that was weighed."""
        others = [
            {"value": o.value, "count": o.count, "parts": o.best.cost.parts, **write(o.best)}
            for o in self.others
        ]
        own = {"parts": self.way.cost.parts, **write(self.way)}
        words = {"name": self.name, "chosen": self.chosen, "why": self.why}
        more = {"left_out": dict(self.left_out), "meshes": write(self.meshes)}
        return {**words, "way": own, "others": others, **more}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.chosen}", f"  {self.why}"]
        for one in (*self.others[1:_IN_WORDS], *self._too_large):
            lines.append(f"  {one.value} {self.against(one.best)}")
        if self.others:
            lines += ["", *listed(table(self._rows()), _LISTED)]
        if self.meshes:
            rows = [("", "by the search for layouts", "memory"), *map(_considered, self.meshes)]
            lines += ["", *listed(table(rows), _LISTED)]
        if self.left_out:
            lines += ["", f"  ruled out by bounds, unbuilt: {left_out_words(self.left_out)}"]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        own = WeighedValue(self.chosen, self.way, 1)
        found = [own, *self.others]
        parts = parts_of(one.best for one in found)
        rows = [("", "a step", *parts, "memory", "the rest of it")]
        for one in found:
            way, mark = one.best, "* " if one is own else "  "
            spent = (seconds_text(way.cost.parts[part]) for part in parts)
            memory = bytes_text(way.memory) + ", too large" * (not way.fits)
            rows.append((f"{mark}{one.value}", seconds_text(way.seconds), *spent, memory, way.how))
        return rows


def explain_way(plan: PlanValue, name: str) -> WayExplanation:
    """The explanation of one of the `QUESTIONS`."""
    limit = plan.cluster.device.memory if plan.limit is None else plan.limit
    ask, way = QUESTIONS[name], plan.alternative(limit)
    found: dict[str, list[Alternative]] = {}
    for one in plan.alternatives:
        found.setdefault(ask(one), []).append(one)
    chosen = ask(way)
    others = [
        WeighedValue(value, _best(ways), len(ways))
        for value, ways in found.items()
        if value != chosen
    ]
    others.sort(key=lambda one: (not one.best.fits, one.best.seconds))
    considered = () if plan.search is None or name != "mesh" else plan.search.considered
    meshes = sorted(considered, key=lambda one: one.seconds or math.inf)
    about = limit, plan.left_out, plan.search is not None
    return WayExplanation(name, chosen, way, tuple(others), *about, tuple(meshes))


def _best(ways: Sequence[Alternative]) -> Alternative:
    return min(ways, key=lambda one: (not one.fits, one.seconds))


def _considered(one: Considered) -> tuple[str, ...]:
    if one.seconds is None:
        return str(one.mesh), one.why, ""
    memory = "" if one.memory is None else bytes_text(one.memory)
    return str(one.mesh), seconds_text(one.seconds), memory


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{seconds_text(seconds)}"
