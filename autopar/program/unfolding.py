"""Unfolding: the blocks of a program in one graph, all of them or a few that stand for the rest.

    unfold(program).graph
    unfold(program, shown=(3, 3)).graph    # one block between three and three stands for the others

What follows from the neighbours of a block (copies of parameters that are gathered ahead, gradients
that are summed together) is the same for all blocks but the outer ones, which are shown. Of what
is in a block that stands for several, `info(node).count` says for how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.program.order import move
from autopar.program.segments import Program, Segment
from autopar.strategies.node_info import info


@dataclass(frozen=True, eq=False)
class Place:
    """Where a node of an unfolded graph comes from."""

    segment: Segment
    name: str  # in the first block
    block: int
    count: int  # of the blocks that it stands for


@dataclass(frozen=True, eq=False)
class Unfolded:
    """A graph, and where those of its nodes come from that stand in repeated blocks, by name."""

    graph: fx.Graph
    places: Mapping[str, Place]

    def twin_in(self, other: Unfolded) -> dict[str, str]:
        """Return by name the node of another graph of the same program that stands for each."""
        names = {
            (place.name, place.block + later): name
            for name, place in other.places.items()
            for later in range(place.count)
        }
        return {name: names[place.name, place.block] for name, place in self.places.items()}


def unfold(
    program: Program, shown: tuple[int, int] | None = None, folded: fx.Graph | None = None
) -> Unfolded:
    """Return the graph of a program.

    `shown`: where many blocks are equal, how many stand before and after the one that stands for
    the others; this goes for segments of the graph `folded` alone, if one is given.
    """
    return _Writer(program, shown, folded).written()


@dataclass
class _Writer:
    program: Program
    shown: tuple[int, int] | None
    folded: fx.Graph | None
    graph: fx.Graph = field(default_factory=fx.Graph)
    # By the name in the first block: of the last block that was written.
    values: dict[str, fx.Node] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)  # the graphs of which some block was written
    places: dict[str, Place] = field(default_factory=dict)

    def written(self) -> Unfolded:
        own = dict[tuple[int, int, str], fx.Node]()
        sources = [
            {node.name: node for node in segment.graph.find_nodes(op="placeholder")}
            for segment in self.program.segments
        ]
        for one in self.program.inputs:
            if isinstance(one, fx.Node):
                self.values[one.name] = self._input(one, one.name)
                continue
            number, names = one
            segment = self.program.segments[number]
            for block, count in self._blocks(segment):
                for name in names:
                    node = sources[number][name]
                    made = self._input(node, segment.name(name, block))
                    self._mark(made, node, segment, block, count)
                    own[number, block, name] = made
        for number, segment in enumerate(self.program.segments):
            for block, count in self._blocks(segment):
                mine = {name: own[number, block, name] for name in segment.own}
                self._write(segment, block, count, mine)
        return Unfolded(self.graph, self.places)

    def _blocks(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Yield the blocks of a segment that are written, and for how many each stands."""
        first, end = segment.first, segment.first + segment.count
        is_folded = self.folded is None or self.folded is segment.graph
        before, after = self.shown if self.shown and is_folded else (segment.count, 0)
        middle = segment.count - before - after
        if middle < 2:
            yield from ((block, 1) for block in range(first, end))
            return
        yield from ((block, 1) for block in range(first, first + before))
        yield first + before, middle
        yield from ((block, 1) for block in range(end - after, end))

    def _input(self, node: fx.Node, name: str) -> fx.Node:
        made = self.graph.placeholder(name)
        made.meta = dict(node.meta)
        return made

    def _write(self, segment: Segment, block: int, count: int, own: Mapping[str, fx.Node]) -> None:
        here = dict[fx.Node, fx.Node]()
        is_first = id(segment.graph) not in self.begun
        for node in segment.graph.nodes:
            if node.op == "placeholder":
                name = node.name
                if name in segment.carried:
                    name = segment.carried[name][0 if is_first else 1]
                here[node] = own[node.name] if node.name in own else self.values[name]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), here.__getitem__)
            name = node.name if block == 0 else f"{node.name}__{block}"
            made = here[node] = self.graph.create_node(node.op, node.target, args, kwargs, name)
            made.meta = dict(node.meta)
            self._mark(made, node, segment, block, count)
        self.begun.add(id(segment.graph))
        self.values |= {node.name: made for node, made in here.items() if node.op != "placeholder"}

    def _mark(self, made: fx.Node, node: fx.Node, segment: Segment, block: int, count: int) -> None:
        if count > 1:
            info(made).count = count
        if not segment.names:
            return
        self.places[made.name] = Place(segment, node.name, block, count)
        if path := info(node).module:
            info(made).module = segment.name(path, block)
        move(made, block * segment.draws, block * segment.checkpoints)
