"""Program: the calls of a plan in order, block by block, with the way of each value beside them.

Of equal blocks the first is shown. Values run downwards in lanes: from the call that makes one to
the last of the block that reads it. Movements stand where they are on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.drawing import Drawing
from autopar.planner.candidate import Candidate
from autopar.report.model import Call, Part, calls_of, joined
from autopar.units import bytes_text, seconds_text

_STEP, _HEIGHT, _WIDTH = 10.0, 24.0, 960.0  # of lanes, of rows, of a whole picture


@dataclass(frozen=True)
class Row:
    """A call, and the lanes of values beside it."""

    call: Call
    module: str
    lanes: Lanes


@dataclass(frozen=True)
class Block:
    """Calls that follow each other, of a block that is there `count` times or of none."""

    name: str
    count: int
    rows: tuple[Row, ...]

    @property
    def seconds(self) -> float:
        return sum(row.call.seconds for row in self.rows)

    @property
    def movements(self) -> int:
        return sum(row.call.moved is not None for row in self.rows)


@dataclass(frozen=True)
class _Repeated:
    name: str  # `layers.{0..3}`
    count: int


def blocks(candidate: Candidate, root: Part) -> list[Block]:
    """The program, of which `root` is the tree."""
    repeated, shown = _repeated(root)
    found: list[tuple[_Repeated, list[tuple[str, Call]]]] = []
    for path, call in calls_of(candidate):
        prefix = _prefix(path, repeated)
        if prefix is not None and prefix not in shown:
            continue
        of = repeated[prefix] if prefix is not None else _Repeated("", 1)
        if not found or found[-1][0] != of:
            found.append((of, []))
        found[-1][1].append((path, call))
    return [Block(of.name, of.count, tuple(_rows(calls))) for of, calls in found]


def _repeated(root: Part) -> tuple[dict[str, _Repeated], set[str]]:
    """Of the paths of blocks, what they are shown as; and those that are shown."""
    found: dict[str, _Repeated] = {}
    shown: set[str] = set()

    def look(part: Part, path: str) -> None:
        for one in part.parts.values():
            if one.count == 1:
                look(one, joined(path, one.name))
                continue
            paths = [joined(path, name) for name in one.members]
            found.update(dict.fromkeys(paths, _Repeated(joined(path, one.name), one.count)))
            shown.add(paths[0])

    look(root, "")
    return found, shown


def _prefix(path: str, repeated: Mapping[str, _Repeated]) -> str | None:
    """The block that a module stands in."""
    names = path.split(".")
    prefixes = (".".join(names[:count]) for count in range(1, len(names) + 1))
    return next((prefix for prefix in prefixes if prefix in repeated), None)


def drawn(some: list[Block], what: str) -> Drawing:
    """All blocks under each other, a line for each call."""
    lines = sum(len(block.rows) + 2 for block in some)
    picture = Drawing(_WIDTH, lines * _HEIGHT, f"the program of {what}")
    y = 0.0
    for block in some:
        count = f", {block.count} times" if block.count > 1 else ""
        name = f"{block.name or 'the model'}{count}: {seconds_text(block.seconds)} each"
        picture.text(0, y + _HEIGHT * 0.75, name, "title")
        y += _HEIGHT
        for row in block.rows:
            row.lanes.draw(picture, y)
            x, middle = (row.lanes.width + 1) * _STEP, y + _HEIGHT / 2 + 4
            picture.text(x, middle, row.call.operator)
            picture.text(x + 190, middle, row.call.type)
            picture.text(x + 470, middle, _beside(row))
            y += _HEIGHT
        y += _HEIGHT
    return picture


def _beside(row: Row) -> str:
    """What a call moves, or its module."""
    moved = row.call.moved
    if moved is None:
        return row.module
    back = moved.backward or "nothing"
    return f"{bytes_text(moved.bytes)} over {moved.axes}, back: {back}"


def _rows(calls: list[tuple[str, Call]]) -> Iterator[Row]:
    """Rows with their lanes; a lane is free again after the last reader of its value."""
    last = {read: call.name for _, call in calls for read in call.reads}
    lane: dict[str, int] = {}
    width = 1
    found = []
    for _, call in calls:
        before = dict(lane)
        for read in set(call.reads) & lane.keys():
            if last[read] == call.name:
                del lane[read]
        own = next(n for n in range(len(lane) + 1) if n not in lane.values())
        if call.name in last:
            lane[call.name] = own
        width = max(width, own + 1, *(n + 1 for n in before.values()))
        found.append((before, dict(lane), own))
    for (module, call), about in zip(calls, found):
        yield Row(call, module, Lanes(call, *about, width))


@dataclass(frozen=True)
class Lanes:
    """The values beside a call: lanes of those that come to it and that leave, and its own."""

    call: Call
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
