"""Programs as segments: a segment is the graph of one block and how often it runs.

    program = recognise(graph, names, 8)      # equal blocks are found (recognition.py)
    first, rest = program.split(segment, [6, 90]).segments[1:3]
    first.graph is rest.graph                  # equal means identical
    unfold(program)                            # all blocks in one graph (unfolding.py)

A placeholder has the name of the node that makes its value; in a repeated block, that of the last
repetition is read. What each block reads of the block before is `carried`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.program.names import Numbered


@dataclass(frozen=True, eq=False)
class Segment:
    """Equal blocks in a row: `graph` is one of them, of the first with its names."""

    graph: fx.Graph  # a placeholder stands for a value that is made elsewhere, by its name
    count: int = 1
    first: int = 0  # the number of its first block, among those of this graph
    names: Mapping[str, Numbered] = field(default_factory=dict)  # of modules and parameters
    own: tuple[str, ...] = ()  # the placeholders of which each block has one of its own
    # By placeholder: what the first of all blocks reads, and what others read of the block before.
    carried: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    draws: int = 0  # of random numbers, in each block
    checkpoints: int = 0  # of the user, in each block
    # By number of a block, and name there: the names in the first.
    _in_first: dict[int, dict[str, str]] = field(default_factory=dict, repr=False)

    def name(self, path: str, block: int) -> str:
        """Return the name in one block of what has a name in the first."""
        numbered = self.names.get(path)
        return path if numbered is None else numbered.of(block)

    def moved(self, path: str, block: int, to: int) -> str:
        """Return the name in another block of what has a name in one."""
        if block not in self._in_first:
            self._in_first[block] = {self.name(name, block): name for name in self.names}
        return self.name(self._in_first[block].get(path, path), to)

    def node_name(self, name: str, block: int) -> str:
        """Return the name of a node in one block; `name`: in the graph."""
        if name in self.own:
            return self.name(name, block)
        return name if block == 0 else f"{name}__{block}"

    def __str__(self) -> str:
        paths = [name for name in self.names.values() if not name.after]
        where = paths[0].listed(self.first, self.count) if paths else "the program"
        return f"{self.count} x {where}"


@dataclass(frozen=True, eq=False)
class OwnInputs:
    """Placeholders of which each block of a graph has its own; they stand block by block."""

    graph: fx.Graph
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Segments that run one after another; the last one has the outputs."""

    segments: tuple[Segment, ...]
    inputs: tuple[fx.Node | OwnInputs, ...]  # in order

    @property
    def is_folded(self) -> bool:
        """Return whether some block stands for several."""
        return any(segment.count > 1 for segment in self.segments)

    def split(self, segment: Segment, counts: Sequence[int]) -> Program:
        """Return the program with several segments in the place of one, which share its graph.

        Layouts, stages and what runs again may then differ from one to the next.

        Args:
            segment: One of `segments`.
            counts: How many blocks each has, in order. Example: `[6, 90]`.
        """
        if sum(counts) != segment.count or min(counts) < 1:
            raise ValueError(f"{[*counts]} blocks are not the {segment.count} of the segment")
        at = self.segments.index(segment)
        pieces, first = list[Segment](), segment.first
        for count in counts:
            pieces.append(replace(segment, count=count, first=first))
            first += count
        segments = (*self.segments[:at], *pieces, *self.segments[at + 1 :])
        return Program(segments, self.inputs)
