"""Recognition: the equal blocks of a graph, found once, as segments of a program.

    program = recognise(graph, names, least=8)     # `names`: of parameters, by placeholder

Blocks are equal when their calls are (equality.py), one by one, and stand to one another and to the
blocks beside them in the same way (rows.py), and when the names of modules and parameters differ in
one number alone. In doubt a block stands for itself. Blocks that were never written are counted by
the numbers that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from autopar.program.equality import facts_of_call, facts_of_input
from autopar.program.names import Numbered, numbered, path_above
from autopar.program.order import checkpoint_number, draw_number, move
from autopar.program.rows import Row, rows
from autopar.program.segments import OwnInputs, Program, Segment
from autopar.strategies.node_info import info

_MOST_TOGETHER = 4  # equal blocks inside one block, whose numbers begin anew in the next


@dataclass(frozen=True, eq=False)
class Repetition:
    """Equal blocks of a graph, and what they are called."""

    row: Row
    blocks: Sequence[int]  # the number of each that is written
    names: Mapping[str, Numbered]  # by name in the first block
    parameters: Mapping[fx.Node, Sequence[fx.Node]]  # by parameter of the first block: of all
    carried: Mapping[fx.Node, fx.Node]  # by what the first block reads: what the second reads
    draws: int  # in each block
    checkpoints: int  # in each block

    @property
    def count(self) -> int:
        """Return the number of blocks, those included that are not written."""
        return self.blocks[-1] + 1

    @property
    def has_its_own(self) -> bool:
        """Return whether these blocks alone read their parameters."""
        inside = {*self.row.inside}
        values = (value for row in self.parameters.values() for value in row)
        return all(inside.issuperset(value.users) for value in values)

    @property
    def missing(self) -> int:
        """Return the number of blocks that are not written."""
        return self.count - len(self.blocks)


def recognise(
    graph: fx.Graph, names: Mapping[str, str], least: int, missing: Collection[str] = ()
) -> Program:
    """Return the program of a graph.

    `names`: of its parameters and buffers, by placeholder. `least`: how many equal blocks are worth
    a segment. `missing`: the modules of blocks that were proved to be equal and never written.
    """
    return _ProgramBuilder(graph, repetitions(graph, names, least, missing)).program()


def repetitions(
    graph: fx.Graph, names: Mapping[str, str], least: int, missing: Collection[str]
) -> list[Repetition]:
    """Return the equal blocks of a graph, in order, but for those that have results of it."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    results = {*graph.output_node().all_input_nodes}
    worthwhile: list[Repetition] = []
    for row in rows(calls, facts_of_call, facts_of_input):
        repetition = _with_names(row, names, missing)
        if repetition is None or repetition.count < least or not repetition.has_its_own:
            continue
        if results.isdisjoint(repetition.row.inside):
            worthwhile.append(repetition)
    return sorted(worthwhile, key=lambda repetition: repetition.row.start)


def _with_names(row: Row, names: Mapping[str, str], missing: Collection[str]) -> Repetition | None:
    """Return a row with its names, from where a module begins, of one or several equal blocks
    together. None: the names are not regular."""
    for together in range(1, _MOST_TOGETHER + 1):
        period = together * row.period
        for start in range(row.start + 1, row.start + period + 1):
            count = (row.end - start) // period
            if count < 2:
                break
            path, before = info(row.calls[start]).module, info(row.calls[start - 1]).module
            if path and path != before:
                repetition = _NameComparison(Row(row.calls, start, period, count), names)()
                if repetition is not None:
                    return _complete(repetition, names, missing)
    return None


def _complete(
    repetition: Repetition, names: Mapping[str, str], missing: Collection[str]
) -> Repetition | None:
    """Return the longest part of a repetition in which no block is missing but those that are known
    to be equal."""
    row, blocks = repetition.row, repetition.blocks
    pieces, start = list[tuple[int, int]](), 0
    for at, (block, following) in enumerate(pairwise(blocks), 1):
        stands_for = info(row.inside[(at - 1) * row.period]).count
        is_counted = following - block == stands_for > 1
        between = range(block + 1, following)
        if not is_counted and not all(_is_one_of(repetition, b, missing) for b in between):
            pieces.append((start, at))
            start = at
    pieces.append((start, len(blocks)))
    start, end = max(pieces, key=lambda piece: piece[1] - piece[0])
    if end - start == len(blocks):
        return repetition
    first = row.start + start * row.period
    return _NameComparison(Row(row.calls, first, row.period, end - start), names)()


def _is_one_of(repetition: Repetition, block: int, modules: Collection[str]) -> bool:
    """Return whether a block is in one of some modules."""
    paths = (name.of(block) for name in repetition.names.values())
    return any(path_above(path, modules) for path in paths)


@dataclass
class _NameComparison:
    """Compares the names in the blocks of a row."""

    row: Row
    parameter_names: Mapping[str, str]  # by placeholder
    names: dict[str, Numbered] = field(default_factory=dict)
    blocks: Sequence[int] = ()

    def __call__(self) -> Repetition | None:
        """Return the blocks of the row with their names. None: these are not regular."""
        if self.row.count < 2:
            return None
        parameters = dict[fx.Node, tuple[fx.Node, ...]]()
        columns = [self._column(place) for place in range(self.row.period)]
        for column in columns:
            if not self._is_regular([info(node).module for node in column]):
                return None
            for values in zip(*(node.all_input_nodes for node in column)):
                if values[0].op == "placeholder" and len({*values}) > 1:
                    parameters[values[0]] = values
        for values in parameters.values():
            if len({*values}) < len(values) or not self._are_named(values):
                return None
        draws = self._step(columns, draw_number)
        checkpoints = self._step(columns, checkpoint_number)
        if not self.blocks or draws is None or checkpoints is None:
            return None
        carried = _carried(self.row)
        if carried is None or not self._begins_with_a_module(columns):
            return None
        return Repetition(
            self.row, self.blocks, self.names, parameters, carried, draws, checkpoints
        )

    def _column(self, place: int) -> list[fx.Node]:
        """Return the calls at one place in all blocks."""
        row = self.row
        return [*row.calls[row.start + place : row.end : row.period]]

    def _are_named(self, values: Sequence[fx.Node]) -> bool:
        """Return whether values are parameters whose names differ in the number of the block."""
        if any(node.name not in self.parameter_names for node in values):
            return False  # constants are made by forward, each for itself
        names = [self.parameter_names[node.name] for node in values]
        placeholders = [node.name for node in values]
        modules = [info(node).module for node in values]
        is_regular = all(map(self._is_regular, (names, placeholders, modules)))
        return is_regular and names[0] in self.names

    def _is_regular(self, texts: Sequence[str]) -> bool:
        """Return whether names are equal, or differ in the number of the block."""
        if len({*texts}) == 1:
            return texts[0] not in self.names
        parsed = numbered(texts)
        if parsed is None:
            return False
        name, blocks = parsed
        if self.blocks and [*self.blocks] != blocks:
            return False
        self.blocks = blocks
        return self.names.setdefault(texts[0], name) == name

    def _begins_with_a_module(self, columns: Sequence[Sequence[fx.Node]]) -> bool:
        """Return whether the modules of a block are those of one number, or of so many in turn."""
        numbers = dict[tuple[str, int], set[int]]()
        for column in columns:
            if (name := self.names.get(info(column[0]).module)) is not None:
                numbers.setdefault((name.before, abs(name.step)), set()).add(name.first)
        return all(max(firsts) - min(firsts) < step for (_, step), firsts in numbers.items())

    def _step(
        self, columns: Sequence[Sequence[fx.Node]], ask: Callable[[fx.Node], int | None]
    ) -> int | None:
        """Return by how much the numbers of calls differ from block to block, 0 if they have none.
        None: that is not regular."""
        is_counted = _stands_for_others(self.row)
        blocks = self.blocks if is_counted else range(len(self.blocks))
        steps = set[float]()
        for column in columns:
            numbers = [(ask(node), block) for node, block in zip(column, blocks)]
            known = [(number, block) for number, block in numbers if number is not None]
            steps |= {(later - n) / (after - at) for (n, at), (later, after) in pairwise(known)}
        if len(steps) > 1 or not all(step.is_integer() for step in steps):
            return None
        return int(max(steps, default=0))


def _stands_for_others(row: Row) -> bool:
    """Return whether the missing blocks were counted by whoever left them out."""
    return any(info(node).count > 1 for node in row.inside)


def _carried(row: Row) -> dict[fx.Node, fx.Node] | None:
    """Return what the second block reads of the first, by what the first reads in its place. None:
    the first reads it in the place of something else, too, or blocks read of one that is further
    back."""
    first, second = row.inside[: row.period], row.inside[row.period : 2 * row.period]
    inside, carried, shared = {*first}, dict[fx.Node, fx.Node](), set[fx.Node]()
    for node, twin in zip(first, second):
        for value, later in zip(node.all_input_nodes, twin.all_input_nodes):
            if value is later:
                shared.add(value)
            elif value not in inside:
                is_further_back = later.op == "call_function" and later not in inside
                if is_further_back or carried.setdefault(value, later) is not later:
                    return None
    return (
        None
        if shared & carried.keys()
        else {value: later for value, later in carried.items() if later in inside}
    )


class _ProgramBuilder:
    """Makes the segments of a graph."""

    def __init__(self, graph: fx.Graph, repetitions: Sequence[Repetition]) -> None:
        self._graph, self._repetitions = graph, repetitions
        self._twins: dict[fx.Node, fx.Node] = {}  # in the first block
        for repetition in repetitions:
            row = repetition.row
            for at in range(row.start + row.period, row.end):
                self._twins[row.calls[at]] = row.calls[row.start + (at - row.start) % row.period]
            for first, values in repetition.parameters.items():
                self._twins |= dict.fromkeys(values[1:], first)
        self._draws = self._checkpoints = 0  # of the blocks before that are missing

    def program(self) -> Program:
        """Return the segments, one after another."""
        nodes = [node for node in self._graph.nodes if node.op != "placeholder"]
        place = {node: at for at, node in enumerate(nodes)}
        segments, end = list[Segment](), 0
        graphs = dict[fx.Node, fx.Graph]()  # by parameter of repeated blocks
        for repetition in self._repetitions:
            start = place[repetition.row.inside[0]]
            if start > end:
                segments.append(Segment(self._copied(nodes[end:start], {})[0]))
            segments.append(self._repeated(repetition))
            for values in repetition.parameters.values():
                graphs |= dict.fromkeys(values, segments[-1].graph)
            if not _stands_for_others(repetition.row):
                self._draws += repetition.missing * repetition.draws
                self._checkpoints += repetition.missing * repetition.checkpoints
            end = place[repetition.row.inside[-1]] + 1
        segments.append(Segment(self._copied(nodes[end:], {})[0]))
        return Program(tuple(segments), self._inputs(graphs))

    def _inputs(self, graphs: Mapping[fx.Node, fx.Graph]) -> tuple[fx.Node | OwnInputs, ...]:
        """Return the placeholders in order; those of all blocks stand where the first ones do."""
        inputs = list[fx.Node | OwnInputs]()
        before: fx.Graph | None = None  # that the last placeholder is of
        for node in self._graph.find_nodes(op="placeholder"):
            graph = graphs.get(node)
            if graph is None:
                inputs.append(node)
            elif node not in self._twins:
                last = inputs[-1] if inputs else None
                if graph is before and isinstance(last, OwnInputs):
                    inputs[-1] = OwnInputs(graph, (*last.names, node.name))
                else:
                    inputs.append(OwnInputs(graph, (node.name,)))
            before = graph
        return tuple(inputs)

    def _repeated(self, repetition: Repetition) -> Segment:
        first = repetition.row.inside[: repetition.row.period]
        graph, names = self._copied(first, repetition.carried)
        return Segment(
            graph,
            repetition.count,
            names=repetition.names,
            own=tuple(node.name for node in repetition.parameters),
            carried=names,
            draws=repetition.draws,
            checkpoints=repetition.checkpoints,
        )

    def _copied(
        self, nodes: Sequence[fx.Node], carried: Mapping[fx.Node, fx.Node]
    ) -> tuple[fx.Graph, dict[str, tuple[str, str]]]:
        """Return a graph of some nodes, in which placeholders stand for what they read, with the
        names of what is carried from block to block."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        placeholders, names = dict[str, fx.Node](), dict[str, tuple[str, str]]()
        inside = {*nodes}
        reads = (value for node in nodes for value in node.all_input_nodes if value not in inside)
        for value in dict.fromkeys(reads):
            source = self._twins.get(value, value)
            name = f"carried_{carried[value].name}" if value in carried else source.name
            if name not in placeholders:
                placeholders[name] = graph.placeholder(name)
                placeholders[name].meta = dict(value.meta)
            copies[value] = placeholders[name]
            if value in carried:
                names[copies[value].name] = source.name, carried[value].name
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copies[node].meta = dict(node.meta)
            move(copies[node], self._draws, self._checkpoints)
        return graph, names
