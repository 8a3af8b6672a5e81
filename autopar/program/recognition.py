"""Recognition: the equal blocks of a graph, found once, as segments of a program.

    program = recognised(graph, names)     # `names`: of parameters and buffers, by placeholder

Blocks are equal when their calls are (equality.py), one by one, and stand to one another and to the
blocks beside them in the same way (rows.py), and when the names of modules and parameters differ in
one number alone. In doubt a block stands for itself. Where numbers leave some blocks out, these are
counted: whoever made the graph has written only a few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from autopar.program.equality import facts_of_call, facts_of_input
from autopar.program.names import Numbered, numbered
from autopar.program.order import checkpoint_number, draw_number, move
from autopar.program.rows import Row, rows
from autopar.program.segments import Program, Segment
from autopar.strategies.node_info import info


_MOST_TOGETHER = 4  # equal blocks inside one block, whose numbers begin anew in the next


@dataclass(frozen=True, eq=False)
class Repetition:
    """Equal blocks of a graph, and what they are called."""

    row: Row
    blocks: Sequence[int]  # the number of each that is written
    names: Mapping[str, Numbered]  # of the first block
    own: Mapping[fx.Node, Sequence[fx.Node]]  # of each parameter of the first: those of all
    draws: int = 0
    checkpoints: int = 0

    @property
    def count(self) -> int:
        return self.blocks[-1] + 1

    @property
    def left_out(self) -> int:
        return self.count - len(self.blocks)


def recognised(graph: fx.Graph, names: Mapping[str, str], least: int) -> Program:
    """Return the program of a graph, whose parameters and buffers have these names by placeholder.

    `least`: how many equal blocks are worth a segment.
    """
    return _Builder(graph, repetitions(graph, names, least)).program()


def repetitions(graph: fx.Graph, names: Mapping[str, str], least: int) -> list[Repetition]:
    """Return all equal blocks of a graph, in order."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    named = (_named(row, names) for row in rows(calls, facts_of_call, facts_of_input))
    found = [one for one in named if one is not None and one.count >= least]
    results = {*graph.output_node().all_input_nodes}
    inside = [one for one in found if results.isdisjoint(one.row.inside)]
    return sorted(inside, key=lambda one: one.row.start)


def _named(row: Row, names: Mapping[str, str]) -> Repetition | None:
    """Return the row with its names, from where a module begins, of one or several equal blocks
    together. None: the names are not regular."""
    for together in range(1, _MOST_TOGETHER + 1):
        period = together * row.period
        for start in range(row.start + 1, row.start + period + 1):
            count = (row.end - start) // period
            if count < 2:
                break
            path, before = info(row.calls[start]).module, info(row.calls[start - 1]).module
            if path and path != before:
                shifted = Row(row.calls, start, period, count)
                if (repetition := _Names(shifted, names).repetition()) is not None:
                    return repetition
    return None


@dataclass
class _Names:
    """Compares the names in the blocks of a row."""

    row: Row
    held: Mapping[str, str]
    names: dict[str, Numbered] = field(default_factory=dict)
    blocks: Sequence[int] = ()

    def repetition(self) -> Repetition | None:
        row, own = self.row, dict[fx.Node, Sequence[fx.Node]]()
        columns = [self._column(place) for place in range(row.period)]
        for column in columns:
            if not self._is_regular([info(node).module for node in column]):
                return None
            for inputs in zip(*(node.all_input_nodes for node in column)):
                if inputs[0].op == "placeholder" and len({*inputs}) > 1:
                    own[inputs[0]] = inputs
        if any(len({*row}) < len(row) or not self._are_named(row) for row in own.values()):
            return None
        if not self.blocks or not self._begins_with_a_module(columns):
            return None
        draws, checkpoints = (
            self._step(columns, draw_number),
            self._step(columns, checkpoint_number),
        )
        if draws is None or checkpoints is None:
            return None
        return Repetition(row, self.blocks, self.names, own, draws, checkpoints)

    def _column(self, place: int) -> list[fx.Node]:
        """Return the calls at one place in all blocks."""
        row = self.row
        return [*row.calls[row.start + place : row.end : row.period]]

    def _are_named(self, inputs: Sequence[fx.Node]) -> bool:
        """Return whether parameters have regular names."""
        if any(node.name not in self.held for node in inputs):
            return False  # constants are made by forward, each for itself
        about = [self.held[node.name] for node in inputs]
        modules = [info(node).module for node in inputs]
        return (
            self._is_regular(about)
            and self._is_regular(modules)
            and self._is_regular([node.name for node in inputs])
            and about[0] in self.names
        )

    def _is_regular(self, texts: Sequence[str]) -> bool:
        """Return whether names are one, or differ in the number of the block."""
        if len({*texts}) == 1:
            return texts[0] not in self.names
        found = numbered(texts)
        if found is None or (self.blocks and [*self.blocks] != found[1]):
            return False
        self.blocks = found[1]
        return self.names.setdefault(texts[0], found[0]) == found[0]

    def _begins_with_a_module(self, columns: Sequence[Sequence[fx.Node]]) -> bool:
        """Return whether the modules of a block are those of one number, or of so many in turn."""
        numbers = dict[tuple[str, int], set[int]]()
        for column in columns:
            if (name := self.names.get(info(column[0]).module)) is not None:
                numbers.setdefault((name.before, abs(name.step)), set()).add(name.first)
        return all(max(found) - min(found) < step for (_, step), found in numbers.items())

    def _step(
        self, columns: Sequence[Sequence[fx.Node]], ask: Callable[[fx.Node], int | None]
    ) -> int | None:
        """Return by how much numbers differ from block to block; None if that is not regular."""
        asked = ([ask(node) for node in column] for column in columns)
        found = ([number for number in row if number is not None] for row in asked)
        steps = {later - earlier for row in found for earlier, later in pairwise(row)}
        return 0 if not steps else steps.pop() if len(steps) == 1 else None


class _Builder:
    """Makes the segments of a graph."""

    def __init__(self, graph: fx.Graph, found: Sequence[Repetition]) -> None:
        self.graph, self.found = graph, found
        self.twins: dict[fx.Node, fx.Node] = {}
        for one in found:
            row = one.row
            for at in range(row.start + row.period, row.end):
                self.twins[row.calls[at]] = row.calls[row.start + (at - row.start) % row.period]
            for first, others in one.own.items():
                self.twins |= dict.fromkeys(others[1:], first)
        self.draws = self.checkpoints = 0  # that were left out until here

    def program(self) -> Program:
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        place = {node: at for at, node in enumerate(calls)}
        segments, at = list[Segment](), 0
        numbers = dict[fx.Node, int]()  # of the segments that have placeholders of their own
        for one in self.found:
            row = one.row
            start, end = place[row.calls[row.start]], place[row.calls[row.end - 1]] + 1
            if start > at:
                segments.append(self._segment(calls[at:start]))
            numbers |= {own: len(segments) for row in one.own.values() for own in row}
            segments.append(self._repeated(one))
            self.draws += one.left_out * one.draws
            self.checkpoints += one.left_out * one.checkpoints
            at = end
        segments.append(self._segment(calls[at:]))
        return Program(tuple(segments), self._inputs(numbers))

    def _inputs(
        self, numbers: Mapping[fx.Node, int]
    ) -> tuple[fx.Node | tuple[int, tuple[str, ...]], ...]:
        """Return the placeholders in order; those of all blocks stand where the first ones do."""
        inputs = list[fx.Node | tuple[int, tuple[str, ...]]]()
        before: fx.Node | None = None
        for node in self.graph.find_nodes(op="placeholder"):
            if node not in numbers:
                inputs.append(node)
            elif node not in self.twins:
                number, last = numbers[node], inputs[-1] if inputs else None
                if before in numbers and isinstance(last, tuple) and last[0] == number:
                    inputs[-1] = number, (*last[1], node.name)
                else:
                    inputs.append((number, (node.name,)))
            before = node
        return tuple(inputs)

    def _segment(self, nodes: Sequence[fx.Node]) -> Segment:
        graph, _ = self._copied(nodes, {})
        return Segment(graph)

    def _repeated(self, one: Repetition) -> Segment:
        row = one.row
        first = row.calls[row.start : row.start + row.period]
        second = row.calls[row.start + row.period : row.start + 2 * row.period]
        last: dict[fx.Node, fx.Node] = {}  # of what the first reads: what the second reads of it
        inside = {*first}
        for node, twin in zip(first, second):
            for value, other in zip(node.all_input_nodes, twin.all_input_nodes):
                if value not in inside and other in inside:
                    last[value] = other
        graph, carried = self._copied(first, last)
        own = tuple(node.name for node in one.own)
        return Segment(
            graph,
            one.count,
            0,
            one.names,
            own,
            carried,
            one.draws,
            one.checkpoints,
        )

    def _copied(
        self, nodes: Sequence[fx.Node], last: Mapping[fx.Node, fx.Node]
    ) -> tuple[fx.Graph, dict[str, tuple[str, str]]]:
        """Return a graph of some nodes, in which placeholders stand for what they read; with the
        names of what is carried from block to block."""
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        carried = dict[str, tuple[str, str]]()
        inside = {*nodes}
        reads = dict.fromkeys(v for node in nodes for v in node.all_input_nodes if v not in inside)
        for value in reads:
            source = self.twins.get(value, value)
            name = f"carried_{last[value].name}" if value in last else source.name
            known = next((one for one in new.values() if one.name == name), None)
            if known is None:
                known = graph.placeholder(name)
                known.meta = dict(value.meta)
            new[value] = known
            if value in last:
                carried[known.name] = source.name, last[value].name
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            made = new[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            made.meta = dict(node.meta)
            move(made, self.draws, self.checkpoints)
        return graph, carried
