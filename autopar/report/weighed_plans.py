"""The plans that were weighed, by time and memory, with the reason why each was not taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.candidates.alternative import Alternative
from autopar.candidates.trial import Trial, measured
from autopar.mesh import Mesh
from autopar.search.search_report import ConsideredMesh
from autopar.text.drawing import WIDE, Axis, Drawing, text_width
from autopar.text.units import bytes_text, counted, seconds_text, share_text

_HEIGHT, _LEFT, _BELOW = 340.0, 76.0, 34.0


@dataclass(frozen=True)
class WeighedPlan:
    """A plan that was weighed, with the reason why it was not taken."""

    figures: Alternative
    is_chosen: bool
    why: str

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by kind."""
        return self.figures.cost.parts

    @property
    def kinds(self) -> Mapping[str, float]:
        """Bytes of each kind at the peak, which they add up to, and on the host."""
        return self.figures.held.kinds


def weighed_plans(
    alternatives: Sequence[Alternative],
    chosen: Alternative,
    limit: float,
    trials: Sequence[Trial] = (),
) -> list[WeighedPlan]:
    """List all plans, the fastest first; measured `trials` decide before predictions."""
    plans, ran = [], measured(trials)
    for figures in sorted(
        {*alternatives, chosen}, key=lambda figures: (figures.seconds, figures.memory)
    ):
        is_chosen = figures == chosen
        if is_chosen:
            why = "chosen"
        elif not figures.fits and figures.memory <= limit:
            why = f"keeps {bytes_text(figures.held.host)} on the host, which has less"
        elif not figures.fits:
            why = f"takes {bytes_text(figures.memory)}, there are {bytes_text(limit)}"
        elif figures.how in ran and chosen.how in ran:
            why = f"{_slower(ran[figures.how] / ran[chosen.how])} when both were run"
        elif figures.seconds > chosen.seconds:
            why = _slower(figures.seconds / chosen.seconds)
        elif figures.seconds == chosen.seconds:
            why = "as fast"
        else:
            faster = share_text(1 - figures.seconds / chosen.seconds)
            why = "was not run" if ran else f"{faster} faster, but more complex"
        plans.append(WeighedPlan(figures, is_chosen, why))
    return plans


def _slower(times: float) -> str:
    """Describe by how much something is slower."""
    return f"{times:.1f}x slower" if times >= 1.5 else f"{share_text(times - 1)} slower"


def draw_scatter(plans: Sequence[WeighedPlan], limit: float, width: float = WIDE) -> Drawing:
    """Draw time to the right and memory upwards, with a line along the Pareto front."""
    seconds = [plan.figures.seconds for plan in plans]
    memory = [plan.figures.memory for plan in plans]
    across = _axis_over(seconds, _LEFT, width - 12)
    up = _axis_over(memory if limit > 1.5 * max(memory) else [*memory, limit], _HEIGHT - _BELOW, 12)
    label = f"{counted(len(plans), 'way')} to run a step by predicted time and memory"
    picture = Drawing(width, _HEIGHT, label)
    for value, words in up.labels(5, bytes_text):
        picture.line([(_LEFT, up.at(value)), (width - 12, up.at(value))], "rule")
        picture.text(_LEFT - 6, up.at(value) + 4, words, "end")
    for value, words in across.labels(8, seconds_text, room=8.0):
        picture.text(across.at(value), _HEIGHT - _BELOW + 16, words, "middle")
    picture.text(width - 12, _HEIGHT - 2, "predicted seconds of a step", "end")
    if limit <= 1.5 * max(memory):
        picture.line([(_LEFT, up.at(limit)), (width - 12, up.at(limit))], "limit")
        picture.text(width - 12, up.at(limit) - 4, f"{bytes_text(limit)} of a device", "end")
    edge = _frontier([plan.figures for plan in plans])
    picture.line([(across.at(plan.seconds), up.at(plan.memory)) for plan in edge], "frontier")
    placed: list[tuple[WeighedPlan, float, float]] = []
    for plan in sorted(plans, key=lambda plan: (plan.is_chosen, -plan.figures.seconds)):
        kind = "chosen" if plan.is_chosen else "slower" if plan.figures.fits else "large"
        x, y = across.at(plan.figures.seconds), up.at(plan.figures.memory)
        parts = (f"{name} {seconds_text(size)}" for name, size in plan.parts.items() if size)
        words = f"{plan.figures}: {plan.why}; {', '.join(parts)}"
        picture.dot(x, y, 7 if plan.is_chosen else 4, kind, words)
        placed.append((plan, x, y))
    _label_dots(picture, placed[::-1])
    return picture


def _axis_over(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis on which the values fill the picture."""
    least, most = min(values), max(values)
    more = 0.08 * (most - least) or 0.1 * most
    return Axis(max(0.0, least - more), most + more, start, end)


def _label_dots(picture: Drawing, placed: Sequence[tuple[WeighedPlan, float, float]]) -> None:
    """Label each dot where there is room, the first ones first."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for _, x, y in placed]
    for plan, x, y in placed:
        words, long = plan.figures.how, text_width(plan.figures.how)
        for left, above in itertools.product((x + 11, x - 11 - long), (y, y - 14, y + 14)):
            box = left, above - 6, left + long, above + 6
            is_inside = left > _LEFT and box[2] < picture.width and box[3] < _HEIGHT - _BELOW
            others = (b for b in taken if b != (x - 8, y - 8, x + 8, y + 8))
            if is_inside and not any(_overlap(box, other) for other in others):
                picture.text(left, above + 4, words)
                taken.append(box)
                break


def _overlap(box: Sequence[float], other: Sequence[float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _frontier(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Return the Pareto front of time and memory, the fastest first."""
    edge: list[Alternative] = []
    for alternative in sorted(
        alternatives, key=lambda alternative: (alternative.seconds, alternative.memory)
    ):
        if not edge or alternative.memory < edge[-1].memory:
            edge.append(alternative)
    return edge


def parts_of(alternatives: Iterable[Alternative]) -> list[str]:
    """List the parts of a step that any alternative has."""
    parts = [alternative.cost.parts for alternative in alternatives]
    return [name for name in parts[0] if any(alternative[name] > 0 for alternative in parts)]


def kinds_of(alternatives: Iterable[Alternative]) -> list[str]:
    """List the kinds of bytes that any alternative holds, at the peak or on the host."""
    held = [alternative.held.kinds for alternative in alternatives]
    return [kind for kind in held[0] if any(alternative[kind] for alternative in held)]


def rows_of(
    alternatives: Sequence[Alternative], names: Sequence[str], taken: Alternative | None
) -> list[tuple[str, ...]]:
    """Return the figures of alternatives as a table, with the chosen one marked.

    Alternatives that read the same appear once.
    """
    parts = parts_of(alternatives)
    marks: dict[tuple[str, ...], str] = {}
    for alternative, name in zip(alternatives, names, strict=True):
        memory = bytes_text(alternative.memory) + ", too large" * (not alternative.fits)
        spent = (seconds_text(alternative.cost.parts[part]) for part in parts)
        row = name, seconds_text(alternative.seconds), *spent, memory
        marks[row] = "* " if alternative is taken else marks.get(row, "  ")
    rows = [(f"{mark}{row[0]}", *row[1:]) for row, mark in marks.items()]
    return [("", "a step", *parts, "memory"), *rows]


def rows_of_meshes(considered: Sequence[ConsideredMesh], chosen: Mesh) -> list[tuple[str, ...]]:
    """Return the meshes that a layout search looked at, the fastest first."""
    rows: list[tuple[str, ...]] = [("", "a step")]

    def order(mesh: ConsideredMesh) -> tuple[float, ...]:
        return mesh.seconds is None, float(f"{mesh.seconds or 0.0:.6g}"), mesh.mesh != chosen

    for mesh in sorted(considered, key=order):
        taken = "" if mesh.seconds is None else seconds_text(mesh.seconds)
        words = f"at least {taken}" if taken and mesh.why else taken or mesh.why
        rows.append((f"{'* ' if mesh.mesh == chosen else '  '}{mesh.mesh}", words))
    return rows


def left_out_words(left_out: Mapping[str, int]) -> str:
    """Describe how many questions about ways to run a step lower bounds ruled out, unasked."""
    return counted(left_out.get("questions", 0), "question")
