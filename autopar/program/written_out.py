"""Written out: all blocks of a rewritten program, of which some were there for many.

    write_out(graph)

A block stands for as many as `info(node).block` says. Copy k reads from copy k - 1 what the shown
block reads from the block before it. A value that the next shown block reads too is shared by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import fx

from autopar.program.order import copy_node, put_in_block
from autopar.strategies.node_info import BlockPlace, info


def write_out(graph: fx.Graph) -> fx.Graph:
    """Return the graph of all blocks; what runs again is not marked in it."""
    return _WholeWriter(graph).written()


@dataclass
class _WholeWriter:
    source: fx.Graph
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of what stands for itself
    # By graph of the first block, name in it, and number of a block: what is shown, and written.
    shown: dict[tuple[fx.Graph, str, int], fx.Node] = field(default_factory=dict)
    copies: dict[tuple[fx.Graph, str, int], fx.Node] = field(default_factory=dict)

    def written(self) -> fx.Graph:
        """Return the graph, block by block."""
        for node in self.source.nodes:
            if (place := info(node).block) is not None:
                self.shown[place.blocks.graph, place.name, place.number] = node
        for place, nodes in _groups(self.source):
            if place is None:
                for node in nodes:
                    self.values[node] = self._copy(node, node.name, info(node).block)
                continue
            for number in range(place.number, place.number + place.count):
                for node in nodes:
                    self._write(node, number)
        return self.graph

    def _write(self, node: fx.Node, number: int) -> None:
        stands_for = info(node).block
        assert stands_for is not None
        place = stands_for.later(number - stands_for.number)
        copy = self._copy(node, place.node_name, place)
        put_in_block(copy, place, before=stands_for.number)
        self.copies[place.blocks.graph, place.name, number] = copy

    def _copy(self, node: fx.Node, name: str, place: BlockPlace | None) -> fx.Node:
        return copy_node(self.graph, node, name, lambda value: self._value(value, node, place))

    def _value(self, value: fx.Node, reader: fx.Node, at: BlockPlace | None) -> fx.Node:
        """Return what a reader reads, as which the node `reader` stands at some place."""
        of_value, of_reader = info(value).block, info(reader).block
        if of_value is None:
            return self.values[value]
        last = of_value.number + of_value.count - 1
        number = last
        if (
            at is not None
            and of_reader is not None
            and of_reader.blocks.graph is of_value.blocks.graph
        ):
            if of_value.number == of_reader.number:
                number = at.number
            elif of_reader.count > 1 and not self._is_read_by_next(value, reader):
                assert of_reader.number == last + 1, "blocks read of the block before"
                number = at.number - 1
        key = of_value.blocks.graph, of_value.name, number
        return self.copies.get(key) or self.values[value]

    def _is_read_by_next(self, value: fx.Node, reader: fx.Node) -> bool:
        """Return whether the same call in the next block reads a value in the same place."""
        place = info(reader).block
        assert place is not None
        key = place.blocks.graph, place.name, place.number + place.count
        following = self.shown[key].all_input_nodes
        pairs = zip(reader.all_input_nodes, following)
        return any(read is value and also_read is value for read, also_read in pairs)


def _groups(graph: fx.Graph) -> Iterator[tuple[BlockPlace | None, Sequence[fx.Node]]]:
    """Yield the nodes between blocks that stand for several, and those of each of these."""
    for block, nodes in groupby([*graph.nodes], key=lambda node: info(node).repeated_block):
        row = [*nodes]
        yield None if block is None else info(row[0]).block, row
