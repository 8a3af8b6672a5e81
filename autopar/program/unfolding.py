"""Unfolding: the blocks of a program in one graph, all of them or a few that stand for the rest.

    unfold(program)
    unfold(program, shown=(3, 3))    # one block between three and three stands for the others

What follows from the neighbours of a block (copies of parameters that are gathered ahead, gradients
that are summed together) is the same for all blocks but the outer ones, which are shown.
`info(node).block` says of each node in which block it stands, and for how many this one does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.program.order import copy_node, put_in_block
from autopar.program.segments import OwnInputs, Program, Segment
from autopar.strategies.node_info import BlockPlace


def unfold(
    program: Program,
    shown: tuple[int, int] | None = None,
    folded: Collection[fx.Graph] | None = None,
) -> fx.Graph:
    """Return the graph of a program.

    `shown`: where many blocks are equal, how many stand before and after the one that stands for
    the others; this goes for segments of the graphs `folded` alone, if they are given.
    """
    return _Writer(program, shown, folded).written()


@dataclass
class _Writer:
    program: Program
    shown: tuple[int, int] | None
    folded: Collection[fx.Graph] | None
    graph: fx.Graph = field(default_factory=fx.Graph)
    # The newest copy of each value, by its name in the first block.
    values: dict[str, fx.Node] = field(default_factory=dict)
    begun: set[fx.Graph] = field(default_factory=set)  # the graphs of which some block was written
    own_inputs: dict[tuple[int, str], fx.Node] = field(default_factory=dict)  # by block and name

    def written(self) -> fx.Graph:
        """Return the graph of all segments, placeholders first."""
        for value in self.program.inputs:
            if isinstance(value, fx.Node):
                self.values[value.name] = self._input(value, value.name)
            else:
                self._own_inputs(value)
        for segment in self.program.segments:
            for block, count in self._blocks(segment):
                self._write(segment, block, count)
        return self.graph

    def _own_inputs(self, inputs: OwnInputs) -> None:
        sources = {node.name: node for node in inputs.graph.find_nodes(op="placeholder")}
        for segment in self.program.segments:
            if segment.graph is not inputs.graph:
                continue
            for block, count in self._blocks(segment):
                for name in inputs.names:
                    source = sources[name]
                    placeholder = self._input(source, segment.node_name(name, block))
                    self._mark(placeholder, source, segment, block, count)
                    self.own_inputs[block, name] = placeholder

    def _blocks(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Yield the blocks of a segment that are written, and for how many each stands."""
        first, end = segment.first, segment.first + segment.count
        is_folded = self.folded is None or segment.graph in self.folded
        before, after = self.shown if self.shown and is_folded else (segment.count, 0)
        middle = segment.count - before - after
        if middle < 2:
            yield from ((block, 1) for block in range(first, end))
            return
        yield from ((block, 1) for block in range(first, first + before))
        yield first + before, middle
        yield from ((block, 1) for block in range(end - after, end))

    def _input(self, source: fx.Node, name: str) -> fx.Node:
        return copy_node(self.graph, source, name, lambda value: value)

    def _write(self, segment: Segment, block: int, count: int) -> None:
        here = dict[fx.Node, fx.Node]()
        is_first = segment.graph not in self.begun
        for source in segment.graph.nodes:
            name = source.name
            if source.op == "placeholder":
                if name in segment.carried:
                    name = segment.carried[name][0 if is_first else 1]
                is_own = name in segment.own
                here[source] = self.own_inputs[block, name] if is_own else self.values[name]
                continue
            name = segment.node_name(name, block)
            node = copy_node(self.graph, source, name, here.__getitem__)
            self._mark(node, source, segment, block, count)
            here[source] = node
        self.begun.add(segment.graph)
        self.values |= {s.name: node for s, node in here.items() if s.op != "placeholder"}

    def _mark(
        self, node: fx.Node, source: fx.Node, segment: Segment, block: int, count: int
    ) -> None:
        if segment.names:
            put_in_block(node, BlockPlace(segment, source.name, block, count))
