"""Folding: a captured program of equal blocks as segments, and written out again.

    program = recognise_segments(captured, least)
    short = fold(captured)          # with a few blocks, one of which stands for many
    fold_in_runs(captured, [[6, 90]])  # with one for 6 blocks, that differ from the next 90

What a step takes is a sum over blocks: many ways to run one are weighed on the short program, and
the one that is taken is made of the whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.hidden import Needed
from autopar.capture.marker import ANNOTATE
from autopar.program.names import path_above
from autopar.program.recognition import recognise
from autopar.program.segments import Program, Segment
from autopar.program.unfolding import unfold
from autopar.strategies.node_info import info

MIN_SEGMENT_BLOCKS = 8  # fewest blocks of a segment; of longer rows capture writes some
MIN_FOLDED_BLOCKS = 12  # for one to stand for others
SHOWN = 3, 3  # before and after the block that stands for the others


def fold(captured: Captured) -> Captured:
    """Return a program with as few blocks as stand for all; the program itself, where it has few,
    or where they differ in what a plan may say of them."""
    facts = [(node.target, info(node)) for node in captured.graph.nodes]
    if any(a.checkpoint is not None or a.on_host or to is ANNOTATE for to, a in facts):
        return captured
    return captured if captured.program is None else _fold(captured, captured.program)


def fold_in_runs(whole: Captured, counts: Sequence[Sequence[int]]) -> Captured:
    """Return a program of which so many blocks in a row are alike, and so many after them; `counts`
    are of each segment that is folded."""
    program = whole.program
    assert program is not None
    for segment, lengths in zip(worth_folding(program), counts, strict=True):
        program = program.split(segment, lengths)
    return _fold(whole, program)


def worth_folding(program: Program) -> list[Segment]:
    """Return the segments of which one block stands for others, where they are alike."""
    return [segment for segment in program.segments if segment.count >= MIN_FOLDED_BLOCKS]


def _fold(whole: Captured, program: Program) -> Captured:
    assert whole.program is not None
    graphs = {segment.graph for segment in worth_folding(whole.program)}
    graph = unfold(program, SHOWN, graphs)
    if all(info(node).count == 1 for node in graph.nodes):
        return whole
    return replace(_with_graph(whole, graph), program=program, unfolded=whole)


def recognise_segments(captured: Captured, least: int, missing: Collection[str] = ()) -> Program:
    """Return the segments of a captured program.

    `least`: the fewest equal blocks of one. `missing`: the modules of blocks that are not written.
    """
    return recognise(captured.graph, captured.parameters | captured.buffers, least, missing)


def complete_program(
    captured: Captured, names: Collection[str], missing: Collection[str]
) -> Captured:
    """Return a program with all its blocks, and its segments; modules may be `missing`.

    `names`: of all parameters and buffers. Where the blocks that are missing are not found between
    equal ones, capture begins again, and writes all.
    """
    program = recognise_segments(captured, MIN_SEGMENT_BLOCKS, missing)
    whole = unfold_captured(captured, program) if program.is_folded else captured
    if not missing and not _are_same(captured, whole):
        return captured  # no segments are better than segments of another program
    written_names = sorted([*whole.parameters.values(), *whole.buffers.values()])
    paths = {info(node).module for node in whole.operators} if missing else set()
    is_whole = {path_above(path, missing) for path in paths}.issuperset(missing)
    if written_names != sorted(names) or not is_whole:
        raise Needed(None)
    return replace(whole, program=program)


def _are_same(captured: Captured, other: Captured) -> bool:
    """Return whether two programs make the same calls, whatever these are called."""
    inputs, others = (
        {c.parameters.get(n.name) or c.buffers.get(n.name) or n.name: n for n in nodes}
        for c in (captured, other)
        for nodes in (c.graph.find_nodes(op="placeholder"),)
    )
    if inputs.keys() != others.keys() or len(captured.graph.nodes) != len(other.graph.nodes):
        return False
    twins = {node: others[name] for name, node in inputs.items()}
    calls, other_calls = (
        [node for node in c.graph.nodes if node.op != "placeholder"] for c in (captured, other)
    )
    for node, twin in zip(calls, other_calls):
        args, kwargs = fx.map_arg((node.args, node.kwargs), twins.get)
        if (node.target, args, kwargs) != (twin.target, twin.args, twin.kwargs):
            return False
        twins[node] = twin
    return True


def unfold_captured(captured: Captured, program: Program) -> Captured:
    """Return a captured program with all blocks of its segments; it may have a few of them."""
    return _with_graph(captured, unfold(program))


def _with_graph(captured: Captured, graph: fx.Graph) -> Captured:
    nodes = {node.name: node for node in graph.nodes}
    twins = {name: place.name for name, n in nodes.items() if (place := info(n).block)}

    def names(known: Mapping[str, str]) -> dict[str, str]:
        named = dict[str, str]()
        for name, node in nodes.items():
            if (path := known.get(twins.get(name, name))) is not None:
                place = info(node).block
                named[name] = path if place is None else place.blocks.name(path, place.number)
        return named

    classes, leaves = captured.classes, captured.output_leaves
    of_nodes = ((name, twins.get(name, name)) for name in nodes)
    return replace(
        captured,
        graph=graph,
        parameters=names(captured.parameters),
        buffers=names(captured.buffers),
        constants={name: value for name, value in captured.constants.items() if name in nodes},
        classes={name: classes[twin] for name, twin in of_nodes if twin in classes},
        output_leaves=tuple(nodes[o.name] if isinstance(o, fx.Node) else o for o in leaves),
    )
