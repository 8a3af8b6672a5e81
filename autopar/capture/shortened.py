"""Shortened: a program of many equal blocks, with a few of them that stand for all.

    short = shortened(captured)     # None: it has too few
    short.captured                  # the same with fewer blocks, one of which stands for `times`
    short.in_runs([6, 90])          # with one for 6 blocks, that differ from the next 90

What a step takes is a sum over blocks: many ways to run one are weighed on the short program, and
the one that is taken is made of the whole one. `info(node).times` is, of what is made in the block
that stands for others, how many these are with it. It has equal blocks on both sides, so that what
follows from neighbours is the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.marker import ANNOTATE
from autopar.capture.rows import Row, longest_row
from autopar.strategies.node_info import info

BESIDE = 3, 3  # equal blocks before and after the one that stands for others
LEAST_BESIDE = 2, 1  # that a graph of costs needs, which follows no gathers
LEAST = 12  # equal blocks of a program that is worth it
_NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")
T = TypeVar("T")


@dataclass(frozen=True)
class Shortened:
    """A program with fewer blocks."""

    captured: Captured
    whole: Captured
    twins: Mapping[str, str]  # of each node that was left out, the one that stands for it
    row: Row  # the blocks of the whole program

    @property
    def times(self) -> int:
        """How many blocks one stands for."""
        return self.captured.times

    def in_runs(self, counts: Sequence[int]) -> Shortened | None:
        """The same where so many blocks in a row will be alike, and so many after them."""
        ends = itertools.accumulate(counts)
        least = sum(BESIDE) + 2
        stands = [
            (end - count + BESIDE[0], count - sum(BESIDE))
            for end, count in zip(ends, counts)
            if count >= least
        ]
        return _shortened(self.whole, self.row, stands)


def shortened(captured: Captured, beside: tuple[int, int] = BESIDE) -> Shortened | None:
    """The program with as few blocks as stand for all; None where it has few, or they differ in
    what a plan may say of them. `beside`: how many stay as they are."""
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    about = [(node.target, info(node)) for node in calls]
    if any(a.checkpoint is not None or a.on_host or to is ANNOTATE for to, a in about):
        return None
    row = longest_row(calls, lambda node: _facts(node, captured), _held)
    row = row and _from_a_module(row)
    if row is None or row.count < LEAST:
        return None
    return _shortened(captured, row, [(beside[0], row.count - sum(beside))])


def _shortened(captured: Captured, row: Row, stands: Sequence[tuple[int, int]]) -> Shortened | None:
    """`stands`: the number of each block that stands for others, and for how many with itself."""
    twins, times = dict[fx.Node, fx.Node](), dict[fx.Node, int]()
    for number, count in stands:
        first = row.start + number * row.period
        own = row.twins(first, first + count * row.period)
        twins |= own
        times |= dict.fromkeys((*row.calls[first : first + row.period], *own.values()), count)
    results = {*captured.graph.output_node().all_input_nodes}
    if not twins.keys().isdisjoint(twins.values()) or not results.isdisjoint({*twins, *times}):
        return None
    names = {node.name: twin.name for node, twin in twins.items()}
    return Shortened(_without(captured, twins, times), captured, names, row)


def _facts(node: fx.Node, captured: Captured) -> Hashable:
    about = info(node)
    path = _NUMBERED.match(about.module)
    inside = about.module[path.end() :] if path else about.module
    kind = captured.classes.get(node.name, str((node.target, node.args[1:])))
    return kind, inside, about.differentiable, about.learns, about.parts


def _held(placeholder: fx.Node) -> Hashable:
    about = info(placeholder)
    shape = tuple(about.val.shape), about.val.dtype
    return shape, about.learns, about.differentiable, about.state_bytes, about.on_host, about.parts


def _from_a_module(row: Row) -> Row | None:
    """The same row of blocks that begin where a module does."""
    paths = [_layer(node) for node in row.calls]
    for at in range(row.start + 1, row.start + row.period + 1):
        if paths[at] and paths[at] != paths[at - 1]:
            count = (row.end - at) // row.period
            blocks = {paths[at + number * row.period] for number in range(count)}
            is_one = all(
                path == paths[at + (place - at) // row.period * row.period]
                for place, path in enumerate(paths[at : at + count * row.period], at)
            )
            return replace(row, start=at, count=count) if is_one and len(blocks) == count else None
    return None


def _layer(node: fx.Node) -> str:
    numbered = _NUMBERED.match(info(node).module)
    return numbered.group() if numbered else ""


def _without(
    captured: Captured, twins: Mapping[fx.Node, fx.Node], times: Mapping[fx.Node, int]
) -> Captured:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node in twins:
            continue

        def copied(value: fx.Node) -> fx.Node:
            return copies[twins.get(value, value)]

        args, kwargs = fx.map_arg((node.args, node.kwargs), copied)
        copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.name, copy.meta = node.name, dict(node.meta)
        if node in times:
            info(copy).times = times[node]
        copies[node] = copy
    names = {node.name for node in copies}
    leaves = captured.output_leaves
    return replace(
        captured,
        graph=graph,
        parameters=_those(captured.parameters, names),
        buffers=_those(captured.buffers, names),
        constants=_those(captured.constants, names),
        classes=_those(captured.classes, names),
        output_leaves=tuple(copies[one] if isinstance(one, fx.Node) else one for one in leaves),
        times=max(times.values(), default=1),
    )


def _those(known: Mapping[str, T], names: set[str]) -> dict[str, T]:
    return {name: one for name, one in known.items() if name in names}
