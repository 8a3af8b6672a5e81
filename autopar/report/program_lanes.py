"""The calls of a plan in order, block by block, with the lifetimes of values as lanes.

Of equal blocks the first is shown. A value runs down its lane from the call that makes it to the
last reader in its block. Movements stand where they happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.candidates.candidate import Candidate
from autopar.report.module_tree import ModuleNode, ProgramCall, calls_of, joined
from autopar.text.drawing import Drawing
from autopar.text.units import bytes_text, seconds_text

_STEP, _HEIGHT, _WIDTH = 10.0, 24.0, 960.0  # of lanes, of rows, of a whole picture


@dataclass(frozen=True)
class ProgramRow:
    """A call, and the lanes of values beside it."""

    call: ProgramCall
    module: str
    lanes: Lanes


@dataclass(frozen=True)
class ProgramBlock:
    """Consecutive calls of one block, or of no block."""

    name: str
    count: int
    rows: tuple[ProgramRow, ...]

    @property
    def seconds(self) -> float:
        return sum(row.call.seconds for row in self.rows)

    @property
    def movements(self) -> int:
        return sum(row.call.moved is not None for row in self.rows)


@dataclass(frozen=True)
class _RepeatedBlock:
    name: str  # `layers.{0..3}`
    count: int


def program_blocks(candidate: Candidate, root: ModuleNode) -> list[ProgramBlock]:
    """Split the program into blocks; `root` is its module tree."""
    repeated, shown = _repeated(root)
    runs: list[tuple[_RepeatedBlock, list[tuple[str, ProgramCall]]]] = []
    for path, call in calls_of(candidate):
        prefix = _prefix(path, repeated)
        if prefix is not None and prefix not in shown:
            continue
        block = repeated[prefix] if prefix is not None else _RepeatedBlock("", 1)
        if not runs or runs[-1][0] != block:
            runs.append((block, []))
        runs[-1][1].append((path, call))
    return [ProgramBlock(block.name, block.count, tuple(_rows(calls))) for block, calls in runs]


def _repeated(root: ModuleNode) -> tuple[dict[str, _RepeatedBlock], set[str]]:
    """Return how each repeated block is shown, and the paths of the blocks that are shown."""
    repeated: dict[str, _RepeatedBlock] = {}
    shown: set[str] = set()
    for path, part in _repeated_parts(root, ""):
        paths = [joined(path, name) for name in part.members]
        repeated |= dict.fromkeys(paths, _RepeatedBlock(joined(path, part.name), part.count))
        shown.add(paths[0])
    return repeated, shown


def _repeated_parts(part: ModuleNode, path: str) -> Iterator[tuple[str, ModuleNode]]:
    """List the outermost repeated blocks, each with the path of the module that it stands in."""
    for child in part.parts.values():
        if child.count == 1:
            yield from _repeated_parts(child, joined(path, child.name))
        else:
            yield path, child


def _prefix(path: str, repeated: Mapping[str, _RepeatedBlock]) -> str | None:
    """Return the repeated block that contains a module, or None."""
    names = path.split(".")
    prefixes = (".".join(names[:count]) for count in range(1, len(names) + 1))
    return next((prefix for prefix in prefixes if prefix in repeated), None)


def draw_program(program: list[ProgramBlock], what: str) -> Drawing:
    """Draw all blocks below each other, a line for each call."""
    lines = sum(len(block.rows) + 2 for block in program)
    picture = Drawing(_WIDTH, lines * _HEIGHT, f"the program of {what}")
    y = 0.0
    for block in program:
        count = f", {block.count} times" if block.count > 1 else ""
        name = f"{block.name or 'the model'}{count}: {seconds_text(block.seconds)} each"
        picture.text(0, y + _HEIGHT * 0.75, name, "title")
        y += _HEIGHT
        for row in block.rows:
            row.lanes.draw(picture, y)
            x, middle = (row.lanes.width + 1) * _STEP, y + _HEIGHT / 2 + 4
            picture.text(x, middle, row.call.operator)
            picture.text(x + 190, middle, row.call.type)
            picture.text(x + 470, middle, _movement_text(row))
            y += _HEIGHT
        y += _HEIGHT
    return picture


def _movement_text(row: ProgramRow) -> str:
    """Describe what a call moves; for other calls return the module."""
    moved = row.call.moved
    if moved is None:
        return row.module
    back = moved.backward or "nothing"
    return f"{bytes_text(moved.bytes)} over {moved.axes}, back: {back}"


def _rows(calls: list[tuple[str, ProgramCall]]) -> Iterator[ProgramRow]:
    """Yield rows with their lanes; a lane is free again after the last reader of its value."""
    last = {read: call.name for _, call in calls for read in call.reads}
    lane: dict[str, int] = {}
    width = 1
    lanes_by_call = []
    for _, call in calls:
        before = dict(lane)
        for read in set(call.reads) & lane.keys():
            if last[read] == call.name:
                del lane[read]
        lane_of_call = next(n for n in range(len(lane) + 1) if n not in lane.values())
        if call.name in last:
            lane[call.name] = lane_of_call
        width = max(width, lane_of_call + 1, *(n + 1 for n in before.values()))
        lanes_by_call.append((before, dict(lane), lane_of_call))
    for (module, call), lanes in zip(calls, lanes_by_call):
        yield ProgramRow(call, module, Lanes(call, *lanes, width))


@dataclass(frozen=True)
class Lanes:
    """The lanes beside a call: values that come in, values that go on, and its own."""

    call: ProgramCall
    before: Mapping[str, int]
    after: Mapping[str, int]
    own: int
    width: int  # of all lanes of the block

    def draw(self, picture: Drawing, top: float) -> None:
        """A row of a picture."""
        reads = [self.before[read] for read in self.call.reads if read in self.before]
        x, middle, end = _x(self.own), top + _HEIGHT / 2, top + _HEIGHT
        for value, number in self.before.items():
            if value in self.after:
                picture.line([(_x(number), top), (_x(number), end)], "lane")
        for number in reads:
            picture.line([(_x(number), top), (x, middle)], "lane")
        if self.call.name in self.after:
            picture.line([(x, middle), (x, end)], "lane")
        if self.call.moved is None:
            picture.dot(x, middle, 3.5, "call")
        else:
            corners = ((-5, 0), (0, -5), (5, 0), (0, 5))
            picture.area([(x + a, middle + b) for a, b in corners], "moved")

    @property
    def drawing(self) -> Drawing:
        """A picture of its own."""
        reads = [read for read in self.call.reads if read in self.before]
        names = ", ".join(reads) or "what is outside of its block"
        picture = Drawing(self.width * _STEP, _HEIGHT, f"{self.call.name} reads {names}")
        self.draw(picture, 0.0)
        return picture


def _x(lane: int) -> float:
    return (lane + 0.5) * _STEP
