"""Equal blocks of a rewritten program: of some that are equal, one is looked at for all.

    blocks = EqualBlocks.of(graph)
    blocks.twin(node)             # the node that stands for it, in a block among others like it
    blocks.beside(other, node)    # what stands to `node` as `other` does to its twin

Which block a node stands in is known from the program that was captured. Blocks are equal when
their calls are (equality.py), one by one, and read, and are read by, the same calls of the same and
of other blocks. The first and the last of them stand for themselves: what is known of a node
follows from its neighbours, and theirs may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from torch import fx

from autopar.program.equality import are_equal
from autopar.strategies.node_info import info

Known = TypeVar("Known")


@dataclass(frozen=True)
class ShownBlocks:
    """The blocks of a program that were equal when it was captured, as they are shown."""

    blocks: Sequence[dict[str, fx.Node]]  # by name in the first block, in order

    @cached_property
    def place(self) -> dict[fx.Node, tuple[int, str]]:
        """Return in which block a node stands, and what it is called in the first."""
        return {
            node: (number, name)
            for number, block in enumerate(self.blocks)
            for name, node in block.items()
        }

    @cached_property
    def is_regular(self) -> bool:
        """Return whether each block that stands for several is between two that are equal to it."""
        counts = [info(next(iter(block.values()))).count for block in self.blocks]
        standing = [at for at, count in enumerate(counts) if count > 1]
        return all(
            0 < at < len(counts) - 1 and self.are_equal(at - 1, at) and self.are_equal(at, at + 1)
            for at in standing
        )

    @cached_property
    def standing(self) -> int:
        """Return the block that stands for most others; the middle one, if none does."""
        counts = [info(next(iter(block.values()))).count for block in self.blocks]
        return counts.index(max(counts)) if max(counts) > 1 else len(counts) // 2

    def are_equal(self, first: int, second: int) -> bool:
        """Return whether two blocks are equal, and stand in the same way to others."""
        block, other = self.blocks[first], self.blocks[second]
        if block.keys() != other.keys():
            return False
        starts = [
            {info(node).region: node for node in reversed(nodes.values())}
            for nodes in (block, other)
        ]
        for node, twin in zip(block.values(), other.values()):
            begins = [start[info(n).region] is n for start, n in zip(starts, (node, twin))]
            if begins[0] != begins[1] or not are_equal(node, twin):
                return False
            near, near_twin = ([*n.all_input_nodes, *n.users] for n in (node, twin))
            if len(near) != len(near_twin) or not all(
                self._are_beside(value, another, second - first)
                for value, another in zip(near, near_twin)
            ):
                return False
        return True

    def _are_beside(self, node: fx.Node, other: fx.Node, distance: int) -> bool:
        """Return whether two nodes are one, or the same in blocks of some `distance`."""
        if node is other:
            return True
        if node not in self.place or other not in self.place:
            return False
        (at, name), (later, other_name) = self.place[node], self.place[other]
        return name == other_name and later - at == distance


def rows_of(graph: fx.Graph) -> list[ShownBlocks]:
    """Return the rows of blocks of a program."""
    rows = dict[fx.Graph, dict[int, dict[str, fx.Node]]]()
    for node in graph.nodes:
        if (place := info(node).block) is not None:
            blocks = rows.setdefault(place.blocks.graph, {})
            blocks.setdefault(place.number, {})[place.name] = node
    return [ShownBlocks([*blocks.values()]) for blocks in rows.values()]


def is_regular(graph: fx.Graph) -> bool:
    """Return whether each block that stands for several is between two that are equal to it."""
    return all(row.is_regular for row in rows_of(graph))


class Twin(NamedTuple):
    """Points to the node that stands for another: the same call in the first block inside a run."""

    node: fx.Node
    row: ShownBlocks
    start: int  # the first of the blocks of the row that are equal
    later: int  # how many blocks the other node stands behind this one


@dataclass(frozen=True)
class EqualBlocks:
    """The runs of equal blocks of a program; of none, every node stands for itself."""

    twins: dict[fx.Node, Twin] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph) -> EqualBlocks:
        """Return the run of each row of a program."""
        twins = dict[fx.Node, Twin]()
        for row in rows_of(graph):
            start, end = row.standing, row.standing + 1
            while start > 0 and row.are_equal(start - 1, row.standing):
                start -= 1
            while end < len(row.blocks) and row.are_equal(end, row.standing):
                end += 1
            shown = row.blocks[start + 1 : end - 1]
            for later, block in enumerate(shown[1:], 1):
                for name, node in block.items():
                    twins[node] = Twin(shown[0][name], row, start, later)
        return cls(twins)

    def twin(self, node: fx.Node) -> fx.Node:
        """Return the node of which the same is known."""
        return self.twins[node].node if node in self.twins else node

    def along(self, compute: Callable[[fx.Node], Known]) -> Callable[[fx.Node], Known]:
        """Return a function that says of a node what follows from it and its neighbours, computed
        once for those that repeat."""
        known: dict[fx.Node, Known] = {}

        def compute_once(node: fx.Node) -> Known:
            twin = self.twin(node)
            if twin not in known:
                known[twin] = compute(twin)
            return known[twin]

        return compute_once

    def beside(self, other: fx.Node, node: fx.Node) -> fx.Node:
        """Return the node near `node` that is what `other` is near its twin.

        All blocks may read one that stands before them."""
        _, row, start, later = self.twins[node]
        at, name = row.place.get(other, (-1, ""))
        return other if at < start else row.blocks[at + later][name]


NO_EQUAL_BLOCKS = EqualBlocks()
