"""Weighed: the ways to run a step that a plan was chosen from, by time and memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.drawing import Axis, Drawing
from autopar.mesh import Mesh
from autopar.planner.candidate import Alternative
from autopar.planner.trial import Trial, measured
from autopar.search.account import Considered
from autopar.units import bytes_text, counted, seconds_text, share_text

# What bounds rule out, and what a guess does, as people call one or more of it.
_SIZES = "number of stages and micro-batches", "numbers of stages and micro-batches"
_RULED_OUT = {"sizes": _SIZES, "schedules": ("schedule", "schedules")}
_GUESSED = {
    "unlikely": _SIZES,
    "unlike": ("way of unequal blocks", "ways of unequal blocks"),
}
_WIDTH, _HEIGHT, _LEFT, _BELOW = 960.0, 340.0, 76.0, 34.0


@dataclass(frozen=True)
class Way:
    """One of them, and why it was not taken."""

    figures: Alternative
    is_chosen: bool
    why: str

    @property
    def parts(self) -> Mapping[str, float]:
        """Where its seconds go."""
        return self.figures.cost.parts

    @property
    def kinds(self) -> Mapping[str, float]:
        """The bytes of each kind at the peak, which they add up to, and on the host."""
        return self.figures.held.kinds


def ways(
    alternatives: Sequence[Alternative],
    chosen: Alternative,
    limit: float,
    trials: Sequence[Trial] = (),
) -> list[Way]:
    """All of them, the fastest first; `trials`: of those that were run, which decided."""
    found, ran = [], measured(trials)
    for one in sorted({*alternatives, chosen}, key=lambda one: (one.seconds, one.memory)):
        is_chosen = one == chosen
        if is_chosen:
            why = "chosen"
        elif not one.fits and one.memory <= limit:
            why = f"keeps {bytes_text(one.held.host)} on the host, which has less"
        elif not one.fits:
            why = f"takes {bytes_text(one.memory)}, there are {bytes_text(limit)}"
        elif one.how in ran and chosen.how in ran:
            why = f"{_slower(ran[one.how] / ran[chosen.how])} when both were run"
        elif one.seconds > chosen.seconds:
            why = _slower(one.seconds / chosen.seconds)
        elif one.seconds == chosen.seconds:
            why = "as fast"
        else:
            why = "was not run" if ran else "faster"
        found.append(Way(one, is_chosen, why))
    return found


def _slower(times: float) -> str:
    """How much longer it takes."""
    return f"{times:.1f}x slower" if times >= 1.5 else f"{share_text(times - 1)} slower"


def scatter(some: Sequence[Way], limit: float) -> Drawing:
    """Time to the right, memory upwards; a line along those that none beats in both."""
    seconds = [one.figures.seconds for one in some]
    memory = [one.figures.memory for one in some]
    across = _around(seconds, _LEFT, _WIDTH - 12)
    up = _around(memory if limit > 1.5 * max(memory) else [*memory, limit], _HEIGHT - _BELOW, 12)
    label = f"{counted(len(some), 'way')} to run a step by predicted time and memory"
    picture = Drawing(_WIDTH, _HEIGHT, label)
    for value in up.ticks(5):
        picture.line([(_LEFT, up.at(value)), (_WIDTH - 12, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, bytes_text(value), "end")
    for value in across.ticks(8):
        picture.text(across.at(value), _HEIGHT - _BELOW + 16, seconds_text(value), "middle")
    picture.text(_WIDTH - 12, _HEIGHT - 2, "predicted seconds of a step", "end")
    if limit <= 1.5 * max(memory):
        picture.line([(_LEFT, up.at(limit)), (_WIDTH - 12, up.at(limit))], "limit")
        picture.text(_WIDTH - 12, up.at(limit) - 4, f"{bytes_text(limit)} of a device", "end")
    edge = _frontier([one.figures for one in some])
    picture.line([(across.at(one.seconds), up.at(one.memory)) for one in edge], "frontier")
    placed: list[tuple[Way, float, float]] = []
    for one in sorted(some, key=lambda one: (one.is_chosen, -one.figures.seconds)):
        kind = "chosen" if one.is_chosen else "slower" if one.figures.fits else "large"
        place = across.at(one.figures.seconds), up.at(one.figures.memory)
        parts = (f"{name} {seconds_text(size)}" for name, size in one.parts.items() if size)
        words = f"{one.figures}: {one.why}; {', '.join(parts)}"
        picture.dot(*place, 7 if one.is_chosen else 4, kind, words)
        placed.append((one, *place))
    _name(picture, placed[::-1])
    return picture


def _around(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis on which they fill the picture."""
    least, most = min(values), max(values)
    more = 0.08 * (most - least) or 0.1 * most
    return Axis(max(0.0, least - more), most + more, start, end)


def _name(picture: Drawing, placed: Sequence[tuple[Way, float, float]]) -> None:
    """Write beside each dot what it is, where there is room: of those that come first."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for _, x, y in placed]
    for one, x, y in placed:
        words, long = one.figures.how, 5.6 * len(one.figures.how)
        for left, above in itertools.product((x + 11, x - 11 - long), (y, y - 14, y + 14)):
            box = left, above - 6, left + long, above + 6
            is_inside = left > _LEFT and box[2] < _WIDTH and box[3] < _HEIGHT - _BELOW
            others = (b for b in taken if b != (x - 8, y - 8, x + 8, y + 8))
            if is_inside and not any(_overlap(box, other) for other in others):
                picture.text(left, above + 4, words)
                taken.append(box)
                break


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _frontier(some: Sequence[Alternative]) -> list[Alternative]:
    """Those that no other beats in time and memory, the fastest first."""
    edge: list[Alternative] = []
    for one in sorted(some, key=lambda one: (one.seconds, one.memory)):
        if not edge or one.memory < edge[-1].memory:
            edge.append(one)
    return edge


def parts_of(some: Iterable[Alternative]) -> list[str]:
    """Where the seconds of any of them go, in one order."""
    parts = [one.cost.parts for one in some]
    return [name for name in parts[0] if any(one[name] > 0 for one in parts)]


def kinds_of(some: Iterable[Alternative]) -> list[str]:
    """The kinds of bytes that any of them holds at the peak, or on the host, in one order."""
    held = [one.held.kinds for one in some]
    return [kind for kind in held[0] if any(one[kind] for one in held)]


def rows_of(
    some: Sequence[Alternative], names: Sequence[str], taken: Alternative | None
) -> list[tuple[str, ...]]:
    """Their figures as a table under its heading, with the parts of a step that any has; what reads
    the same once, what was taken marked."""
    parts = parts_of(some)
    marks: dict[tuple[str, ...], str] = {}
    for one, name in zip(some, names, strict=True):
        memory = bytes_text(one.memory) + ", too large" * (not one.fits)
        spent = (seconds_text(one.cost.parts[part]) for part in parts)
        row = name, seconds_text(one.seconds), *spent, memory
        marks[row] = "* " if one is taken else marks.get(row, "  ")
    rows = [(f"{mark}{row[0]}", *row[1:]) for row, mark in marks.items()]
    return [("", "a step", *parts, "memory"), *rows]


def rows_of_meshes(considered: Sequence[Considered], own: Mesh) -> list[tuple[str, ...]]:
    """Meshes that a search for layouts has looked at, the fastest first."""
    rows: list[tuple[str, ...]] = [("", "a step")]

    def order(one: Considered) -> tuple[bool, float, bool]:
        return one.seconds is None, float(f"{one.seconds or 0.0:.6g}"), one.mesh != own

    for one in sorted(considered, key=order):
        taken = "" if one.seconds is None else seconds_text(one.seconds)
        words = f"at least {taken}" if taken and one.why else taken or one.why
        rows.append((f"{'* ' if one.mesh == own else '  '}{one.mesh}", words))
    return rows


def left_out_words(left_out: Mapping[str, int]) -> str:
    """How many bounds have ruled out, of each kind, and how many a guess."""
    words, guessed = (_counted(left_out, kinds) for kinds in (_RULED_OUT, _GUESSED))
    return f"{words or 'none'}; left out by a guess: {guessed}" if guessed else words


def _counted(counts: Mapping[str, int], kinds: Mapping[str, tuple[str, str]]) -> str:
    found = {words: counts[kind] for kind, words in kinds.items() if counts.get(kind)}
    return ", ".join(f"{count:,} {words[count > 1]}" for words, count in found.items())
