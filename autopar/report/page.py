"""The page of a plan: one HTML file that needs nothing else.

Everything is there without scripts: sections, pictures, trees that unfold. The script adds search,
sortable columns, and `/` to search from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.candidates.trial import Trial
from autopar.pipeline.schedule_labels import schedule_words
from autopar.report.machine_diagram import draw_machine
from autopar.report.memory_charts import draw_memory, held_at_peak, rank_memories, shows_limit
from autopar.report.module_tree import ModuleNode, ProgramCall, joined, module_tree
from autopar.report.program_lanes import program_blocks
from autopar.report.run_charts import TrainingRun, measured_gantt, run_sections
from autopar.report.step_parts import BarShare, draw_bar, step_parts
from autopar.report.traffic import link_traffic
from autopar.report.weighed_plans import (
    draw_scatter,
    kinds_of,
    left_out_words,
    parts_of,
    weighed_plans,
)
from autopar.search.search_report import SearchReport
from autopar.states import WHOLE
from autopar.text.drawing import NARROW, WIDE, Drawing, style
from autopar.text.units import bytes_text, counted, printable_text, scaled, seconds_text, share_text

_COSTS = 200  # that are shown


@dataclass(frozen=True)
class PageContext:
    """Facts of a plan that its candidate does not have."""

    mode: str
    limit: float  # bytes of each device
    alternatives: tuple[Alternative, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # by bounds or a guess
    trials: tuple[Trial, ...] = ()  # of ways that were run


@dataclass(frozen=True)
class CallCost:
    """The seconds that calls of equal blocks take together in a step."""

    module: str
    call: ProgramCall
    count: int

    @property
    def seconds(self) -> float:
        return self.count * self.call.seconds


def page(
    title: str, candidate: Candidate, context: PageContext, run: TrainingRun | None = None
) -> str:
    """Render the page, with the charts of a run if one is given."""
    root, sent = module_tree(candidate), link_traffic(candidate)
    chosen = candidate.alternative(context.limit)
    weighed = weighed_plans(context.alternatives, chosen, context.limit, context.trials)
    costs = _costs(root, candidate.microbatches)
    courses = rank_memories(candidate)
    spent, held = step_parts(candidate), held_at_peak(candidate)
    from jinja2 import Environment, PackageLoader  # only a page needs it

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
        asked=context,
        tiles=_tiles(candidate, context),
        spent=(spent, _bar(spent, candidate.seconds, "the predicted step")),
        held=(
            held,
            _bar(held, _room(held, candidate.room(context.limit)), "memory of the fullest device"),
        ),
        root=root,
        blocks=program_blocks(candidate, root),
        costs=costs[:_COSTS],
        others=costs[_COSTS:],
        machine=_at_both_widths(partial(draw_machine, candidate, sent)),
        sent=sent,
        gantts=_gantts(candidate, run),
        memory=[_at_both_widths(partial(draw_memory, c, context.limit)) for c in courses],
        shows_limit=any(shows_limit(course, context.limit) for course in courses),
        weighed=weighed,
        parts=parts_of([way.figures for way in weighed]),
        kinds=kinds_of([way.figures for way in weighed]),
        left_out=left_out_words(context.left_out),
        scatter=len(weighed) > 1 and _at_both_widths(partial(draw_scatter, weighed, context.limit)),
        more=[
            (section, _at_both_widths(section.picture))
            for section in ([] if run is None else run_sections(run, candidate))
        ],
    )
    return printable_text(written)


def _bar(shares: Sequence[BarShare], whole: float, what: str) -> Drawing:
    words = ", ".join(f"{share.name} {share.text}" for share in shares)
    return draw_bar(shares, whole, f"{what}: {words}")


def _at_both_widths(draw: Callable[[float], Drawing]) -> str:
    """Return a picture for a screen and one for a phone; a page shows the one that fits."""
    return "".join(
        f'<div class="{name}">{draw(width)}</div>'
        for name, width in (("roomy", WIDE), ("narrow", NARROW))
    )


def _gantts(candidate: Candidate, run: TrainingRun | None) -> dict[str, str]:
    """Draw the recorded schedule above the predicted one, on one axis."""
    if candidate.timeline is None:
        return {}
    gantts = {"predicted": candidate.timeline.gantt(seconds_text)}
    if run is not None and (measured := measured_gantt(run.events, candidate)) is not None:
        gantts = {"measured, in the last step that was recorded": measured, **gantts}
    longest = max(gantt.end for gantt in gantts.values())
    return {name: _at_both_widths(partial(gantt.drawn, longest)) for name, gantt in gantts.items()}


def _room(held: Sequence[BarShare], limit: float) -> float:
    """Return the bytes at the end of the memory bar: a device, unless it is nearly empty."""
    whole = sum(share.size for share in held)
    return max(whole, limit) if limit < 4 * whole else whole


def _tiles(candidate: Candidate, context: PageContext) -> list[tuple[str, str, str]]:
    """Return the tiles at the top: a name, a figure, and an explanation each."""
    cost, mesh = candidate.cost, candidate.whole_mesh
    moved = f"{seconds_text(cost.exposed)} of it movements that nothing hides"
    tiles = [
        ("a step", seconds_text(candidate.seconds), moved),
        (
            "memory",
            bytes_text(candidate.memory.peak),
            f"of {bytes_text(candidate.room(context.limit))} on the fullest device",
        ),
        (
            "mesh",
            ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items()),
            f"on {candidate.cluster.first(mesh.size).taken}",
        ),
        ("micro-batches", str(candidate.microbatches), _schedule(candidate)),
        ("states", "" if candidate.states == WHOLE else str(candidate.states), "of parameters"),
        ("search", *_search(candidate.search)),
    ]
    return [(name, figure or "whole", words) for name, figure, words in tiles]


def _schedule(candidate: Candidate) -> str:
    pipelining = candidate.pipelining
    if pipelining is None:
        return "without a pipeline"
    words = schedule_words(pipelining.schedule.name, dict(pipelining.schedule.options))
    return f"{words}, {counted(len(pipelining.stages), 'stage')} over {pipelining.axis}"


def _search(search: SearchReport | None) -> tuple[str, str]:
    if search is None:
        return "none", "layouts were spread from annotations and the batch"
    gap = f"gap {share_text(search.gap)}" if search.bound else "no bound"
    strategies = f"{search.sizes.strategies:,} strategies of {counted(search.sizes.nodes, 'node')}"
    early = "ended early: what was not weighed may be better; " * search.interrupted
    return gap, f"{early}{seconds_text(search.seconds)}, {strategies}"


def _costs(root: ModuleNode, times: int) -> list[CallCost]:
    """List all calls, the most expensive first."""
    return sorted(_costs_of(root, "", times), key=lambda cost: -cost.seconds)


def _costs_of(part: ModuleNode, path: str, times: int) -> Iterator[CallCost]:
    """List the calls of a part of the model that take time, in the order of the program."""
    for call in part.calls:
        if call.seconds:
            yield CallCost(path or "the model", call, times)
    for child in part.parts.values():
        yield from _costs_of(child, joined(path, child.name), times * child.count)
