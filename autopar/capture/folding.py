"""Folding: a captured program of equal blocks as segments, and written out again.

    program = in_segments(captured)
    short = folded(captured)        # None: it has too few equal blocks
    short.captured                  # the same with a few blocks, one of which stands for many
    short.in_runs([6, 90])          # with one for 6 blocks, that differ from the next 90

What a step takes is a sum over blocks: many ways to run one are weighed on the short program, and
the one that is taken is made of the whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.hidden import Needed
from autopar.capture.marker import ANNOTATE
from autopar.program.recognition import recognised
from autopar.program.segments import Program, Segment
from autopar.program.unfolding import Unfolded, unfold
from autopar.strategies.node_info import info

FEWEST = 8  # equal blocks that a capture may have written a few of
LEAST = 12  # equal blocks that are worth it
SHOWN = 3, 3  # before and after the block that stands for the others
LEAST_SHOWN = 2, 1  # that a graph of costs needs, which follows no gathers


@dataclass(frozen=True, eq=False)
class Folded:
    """A program in which one block stands for many."""

    captured: Captured
    whole: Captured
    twins: Mapping[str, str]  # by name of each node of the whole program what stands for it
    program: Program
    segment: Segment  # of which a block stands for others
    shown: tuple[int, int]  # blocks beside it
    blocks: Sequence[Sequence[str]]  # of the whole program: the names of its nodes, by block

    @property
    def count(self) -> int:
        """Return how many blocks one stands for."""
        return self.segment.count - sum(self.shown)

    def in_runs(self, counts: Sequence[int]) -> Folded:
        """Return the same where so many blocks in a row are alike, and so many after them."""
        return _folded(self.whole, self.program.split(self.segment, counts), self.segment, SHOWN)


def folded(captured: Captured, shown: tuple[int, int] = SHOWN) -> Folded | None:
    """Return the program with as few blocks as stand for all; None where it has few, or they differ
    in what a plan may say of them. `shown`: how many stay as they are."""
    about = [(node.target, info(node)) for node in captured.graph.nodes]
    if any(a.checkpoint is not None or a.on_host or to is ANNOTATE for to, a in about):
        return None
    program = captured.program
    if program is None:
        return None
    sizes = {
        one: one.count * len(one.graph.nodes) for one in program.segments if one.count >= LEAST
    }
    if not sizes:
        return None
    return _folded(captured, program, max(sizes, key=lambda one: sizes[one]), shown)


def _folded(
    captured: Captured, program: Program, segment: Segment, shown: tuple[int, int]
) -> Folded:
    whole, unfolded = unfold(program), unfold(program, shown, segment.graph)
    blocks = [list[str]() for _ in range(segment.count)]
    for name, place in whole.places.items():
        if place.segment.graph is segment.graph:
            blocks[place.block].append(name)
    short = _written(captured, unfolded)
    return Folded(short, captured, whole.twin_in(unfolded), program, segment, shown, blocks)


def in_segments(captured: Captured, least: int) -> Program:
    """Return the segments of a captured program; `least`: the fewest equal blocks of one."""
    return recognised(captured.graph, captured.parameters | captured.buffers, least)


def whole_of(captured: Captured, names: Collection[str]) -> Captured:
    """Return a program with all its blocks, of which capture may have written a few, and segments.

    `names`: of all parameters and buffers. Where blocks that were left out turn out to differ from
    those that were written, capture begins again, and writes all.
    """
    program = in_segments(captured, FEWEST)
    whole = written(captured, program) if program.is_folded else captured
    if {*whole.parameters.values(), *whole.buffers.values()} != {*names}:
        raise Needed(None)
    return replace(whole, program=program)


def written(captured: Captured, program: Program) -> Captured:
    """Return a captured program with all blocks of its segments; it may have a few of them."""
    return _written(captured, unfold(program))


def _written(captured: Captured, unfolded: Unfolded) -> Captured:
    nodes = {node.name: node for node in unfolded.graph.nodes}
    places = unfolded.places
    twins = {name: places[name].name if name in places else name for name in nodes}

    def names(known: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, twin in twins.items():
            if twin in known:
                place = places.get(name)
                found[name] = place.segment.name(known[twin], place.block) if place else known[twin]
        return found

    classes, leaves = captured.classes, captured.output_leaves
    return replace(
        captured,
        graph=unfolded.graph,
        parameters=names(captured.parameters),
        buffers=names(captured.buffers),
        constants={name: value for name, value in captured.constants.items() if name in nodes},
        classes={name: classes[twin] for name, twin in twins.items() if twin in classes},
        output_leaves=tuple(nodes[o.name] if isinstance(o, fx.Node) else o for o in leaves),
    )
