"""Page: a plan as one HTML file that needs nothing else.

Everything is there without scripts: sections, pictures, trees that unfold. The script adds what
asks for one: search, columns that sort, `/` to search from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, PackageLoader

from autopar.drawing import Drawing, style
from autopar.pipeline.words import schedule_words
from autopar.planner.candidate import Alternative, Candidate
from autopar.planner.trial import Trial
from autopar.report.machine import machine
from autopar.report.memory import drawn, held_at_peak, memory_courses, shows_limit
from autopar.report.model import Call, Part, joined, tree
from autopar.report.program import blocks
from autopar.report.step import Share, bar, seconds
from autopar.report.traffic import traffic
from autopar.report.training import Run, measured, sections
from autopar.report.weighed import kinds_of, left_out_words, parts_of, scatter, ways
from autopar.search.account import Search
from autopar.units import bytes_text, counted, scaled, seconds_text, share_text, visible

_COSTS = 200  # that are shown


@dataclass(frozen=True)
class Asked:
    """What a plan tells besides its candidate."""

    mode: str
    limit: float  # bytes of each device
    alternatives: tuple[Alternative, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # by bounds or a guess
    trials: tuple[Trial, ...] = ()  # of ways that were run


@dataclass(frozen=True)
class Cost:
    """What calls of equal blocks take together in a step."""

    module: str
    call: Call
    count: int

    @property
    def seconds(self) -> float:
        return self.count * self.call.seconds


def page(title: str, candidate: Candidate, asked: Asked, run: Run | None = None) -> str:
    """The whole file, with how a run of it went."""
    root, sent = tree(candidate), traffic(candidate)
    chosen = candidate.alternative(asked.limit)
    weighed = ways(asked.alternatives, chosen, asked.limit, asked.trials)
    costs = _costs(root, candidate.microbatches)
    courses = memory_courses(candidate)
    spent, held = seconds(candidate), held_at_peak(candidate)
    environment = Environment(loader=PackageLoader("autopar.report", "."), autoescape=True)
    environment.filters |= {
        "seconds": seconds_text,
        "bytes": bytes_text,
        "share": share_text,
        "rate": lambda value: scaled(value, "B/s", 3),
    }
    folder = files("autopar.report")
    written = environment.get_template("page.html").render(
        title=title,
        style=style() + folder.joinpath("page.css").read_text(),
        script=folder.joinpath("page.js").read_text(),
        plan=candidate,
        asked=asked,
        tiles=_tiles(candidate, asked),
        spent=(spent, _bar(spent, candidate.seconds, "the predicted step")),
        held=(
            held,
            _bar(held, _room(held, candidate.room(asked.limit)), "memory of the fullest device"),
        ),
        root=root,
        blocks=blocks(candidate, root),
        costs=costs[:_COSTS],
        others=costs[_COSTS:],
        machine=machine(candidate, sent),
        sent=sent,
        gantts=_gantts(candidate, run),
        memory=[drawn(course, asked.limit) for course in courses],
        shows_limit=any(shows_limit(course, asked.limit) for course in courses),
        weighed=weighed,
        parts=parts_of([way.figures for way in weighed]),
        kinds=kinds_of([way.figures for way in weighed]),
        left_out=left_out_words(asked.left_out),
        scatter=scatter(weighed, asked.limit) if len(weighed) > 1 else None,
        more=[] if run is None else sections(run, candidate),
    )
    return visible(written)


def _bar(shares: Sequence[Share], whole: float, what: str) -> Drawing:
    words = ", ".join(f"{share.name} {share.text}" for share in shares)
    return bar(shares, whole, f"{what}: {words}")


def _gantts(candidate: Candidate, run: Run | None) -> dict[str, Drawing]:
    """The schedule as it was carried out above the predicted one, on one axis."""
    if candidate.timeline is None:
        return {}
    found = {"predicted": candidate.timeline.gantt(seconds_text)}
    if run is not None and (seen := measured(run.events, candidate)) is not None:
        found = {"measured, in the last step that was recorded": seen, **found}
    longest = max(one.end for one in found.values())
    return {name: one.drawn(longest) for name, one in found.items()}


def _room(held: Sequence[Share], limit: float) -> float:
    """What the bar of memory stands for: a device, if it is not nearly empty."""
    whole = sum(share.size for share in held)
    return max(whole, limit) if limit < 4 * whole else whole


def _tiles(candidate: Candidate, asked: Asked) -> list[tuple[str, str, str]]:
    """What is said first: a word, a figure, and what belongs to it."""
    cost, mesh = candidate.cost, candidate.whole_mesh
    moved = f"{seconds_text(cost.exposed)} of it movements that nothing hides"
    tiles = [
        ("a step", seconds_text(candidate.seconds), moved),
        (
            "memory",
            bytes_text(candidate.memory.peak),
            f"of {bytes_text(candidate.room(asked.limit))} on the fullest device",
        ),
        (
            "mesh",
            ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items()),
            f"on {candidate.cluster.first(mesh.size).taken}",
        ),
        ("micro-batches", str(candidate.microbatches), _schedule(candidate)),
        ("states", "" if candidate.states.is_whole else str(candidate.states), "of parameters"),
        ("search", *_search(candidate.search)),
    ]
    return [(name, figure or "whole", words) for name, figure, words in tiles]


def _schedule(candidate: Candidate) -> str:
    made = candidate.pipelining
    if made is None:
        return "without a pipeline"
    words = schedule_words(made.schedule.name, dict(made.schedule.options))
    return f"{words}, {counted(len(made.stages), 'stage')} over {made.axis}"


def _search(search: Search | None) -> tuple[str, str]:
    if search is None:
        return "none", "layouts were spread from annotations and the batch"
    gap = f"gap {share_text(search.gap)}" if search.bound else "no bound"
    strategies = f"{search.sizes.strategies:,} strategies of {counted(search.sizes.nodes, 'node')}"
    early = "ended early: what was not weighed may be better; " * search.interrupted
    return gap, f"{early}{seconds_text(search.seconds)}, {strategies}"


def _costs(root: Part, times: int) -> list[Cost]:
    """All calls, those that take most first."""
    found: list[Cost] = []

    def look(part: Part, path: str, count: int) -> None:
        taking = [call for call in part.calls if call.seconds]
        found.extend(Cost(path or "the model", call, count) for call in taking)
        for one in part.parts.values():
            look(one, joined(path, one.name), count * one.count)

    look(root, "", times)
    return sorted(found, key=lambda cost: -cost.seconds)
