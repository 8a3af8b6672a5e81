"""Tables of aligned columns and wrapped lines, no wider than a page.

>>> rows = ("", "a step"), ("* no pipeline", "531 ms"), ("  2 ranks deep", "558 ms")
>>> print(*table(rows), sep="\\n")
                  a step
  * no pipeline   531 ms
    2 ranks deep  558 ms
>>> print(*wrap_line("search: 61,618 strategies of 506 nodes, proved", width=30), sep="\\n")
search: 61,618 strategies of
  506 nodes, proved
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

WIDTH = 80  # characters of a page
_WIDEST = 64  # of a column that others are aligned behind
_HANG = 2  # the indent of continued lines
_LEAST_HUNG = 16  # characters of a column whose continued lines are indented
_WORDS, _NAMES, _BRACKETS, _ALL = range(4)  # the pieces that may be split, if they have to be
_LONG_NAME = 24  # characters
_SHORT = 8  # characters of a piece that is never split
_LEADS = ("=", "+", "->", "|", "over")  # they stand before what follows
_NUMBER = re.compile(r"[+<>~-]?[\d.,]+(?:e[+-]?\d+)?")  # it stays with its unit
# The places in a name of several parts where another part begins.
_PARTS = re.compile(r"(?<=[\w}\])])(?=\.[A-Za-z_{])|(?<=[/_])(?=[A-Za-z])")


def first_lines(lines: Sequence[str], most: int, where: str = "") -> list[str]:
    """Return the first lines, and a line that counts the others and says `where` they are."""
    more = len(lines) - most
    return [*lines[:most], *([f"  and {more} more{where}"] if more > 0 else [])]


def wrap_line(line: str, hang: int | None = None, width: int = WIDTH) -> list[str]:
    """Wrap a line; continued lines are indented by `hang`, or by two more than the first."""
    indent = len(line) - len(line.lstrip())
    text, behind = line.strip(), indent + _HANG if hang is None else hang
    first, *rest = _filled(text, width - indent, width - behind)
    return [" " * indent + first, *(" " * behind + more for more in rest)]


def table(rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """Return rows of cells as lines of aligned columns; wide cells take several lines.

    `most` limits the rows below the heading.
    """
    shown = rows if most is None else rows[: most + 1]
    widths = _fitting([*zip(*shown)])
    lines = [line for row in shown for line in _lines(row, widths)]
    return [*lines, *([f"  and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else [])]


def stacked_table(rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """Like `table`, but with the first cell of each row above the others if that is too wide."""
    if _wide([*zip(*rows)]) <= WIDTH - 2:
        return table(rows, most)
    shown = rows if most is None else rows[: most + 1]
    figures = [("  ", *row[1:]) for row in shown]
    widths = _fitting([*zip(*figures)])
    heading = [] if not shown[0][0] else wrap_line(f"  {shown[0][0]}")
    lines = [*heading, *_lines(figures[0], widths)]
    for row, cells in zip(shown[1:], figures[1:]):
        lines += [*wrap_line(f"  {row[0]}", 8), *_lines(cells, widths)]
    return [*lines, *([f"  and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else [])]


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row, as many as its longest cell takes."""
    cells = [_in_column(cell, width) for cell, width in zip(row, widths)]
    for number in range(max(map(len, cells))):
        parts = (
            (cell[number] if number < len(cell) else "").ljust(min(width, _WIDEST))
            for cell, width in zip(cells, widths)
        )
        yield ("  " + "  ".join(parts)).rstrip()


@lru_cache(1 << 12)
def _in_column(cell: str, width: int) -> list[str]:
    """Return the lines of a cell; continued lines are indented if there is room."""
    if len(cell) <= width:
        return [cell]
    lead = cell[: len(cell) - len(cell.lstrip(" *"))]  # marks of a row stay in front
    behind = len(lead) + (_HANG if lead or width >= _LEAST_HUNG else 0)
    first, *rest = _filled(cell[len(lead) :], width - len(lead), width - behind, _ALL)
    return [lead + first, *(" " * behind + more for more in rest)]


def _wide(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + 2 * (len(columns) - 1)


def _fitting(columns: Sequence[Sequence[str]]) -> list[int]:
    """Return widths of columns with which a table fits the page in the fewest lines.

    Headings are made narrower first.
    """
    rows, widths = [*zip(*columns)], [max(map(len, column)) for column in columns]
    if _wide(columns) > WIDTH - 2:
        headings = (_least(heading, _WORDS) for heading, *_ in columns)
        below = (max(map(len, column[1:]), default=0) for column in columns)
        widths = [max(pair) for pair in zip(headings, below)]

    def height(at: int) -> tuple[int, int]:
        """Return the lines with column `at` one narrower; of equals the widest comes first."""
        less = [width - (number == at) for number, width in enumerate(widths)]
        cells = (map(_in_column, row, less) for row in rows)
        return sum(max(map(len, row)) for row in cells), -widths[at]

    for level in (_NAMES, _BRACKETS, _ALL):
        least = [max(_least(cell, level) for cell in column) for column in columns]
        while sum(widths) + 2 * (len(widths) - 1) > WIDTH - 2:
            free = [at for at, width in enumerate(widths) if width > least[at]]
            if not free:
                break
            widths[min(free, key=height)] -= 1
    return widths


def _least(cell: str, level: int) -> int:
    """Return the width of the longest piece of a cell."""
    lead = len(cell) - len(cell.lstrip(" *"))
    return lead + max(len(piece) for piece, _ in _pieces(cell[lead:], level))


def _filled(text: str, first: int, rest: int, most: int = _BRACKETS) -> list[str]:
    """Split a text into lines: the first of one width, the others of another.

    Pieces are split further up to the level `most`.
    """
    lines, room = [""], first
    waiting = [(*piece, _WORDS) for piece in _pieces(text, _WORDS)[::-1]]
    while waiting:
        piece, glue, level = waiting.pop()
        if len(piece) > max(room, rest) and level < most:
            (start, _), *others = _pieces(piece, level + 1)
            waiting += [(*other, level + 1) for other in others[::-1]]
            waiting.append((start, glue, level + 1))
            continue
        joined = lines[-1] + (glue if lines[-1] else "") + piece
        if lines[-1] and len(joined) > room:
            lines.append(piece)
            room = rest
        else:
            lines[-1] = joined
    return lines


def _pieces(text: str, level: int) -> list[tuple[str, str]]:
    """Return the pieces of a text that stay together, each with the glue before it.

    Numbers stay with their units; the level says whether names and brackets are split, too.
    """
    words: list[str] = []
    depth, last = 0, ""
    for word in text.split(" "):
        is_inside = depth > 0 and level < _BRACKETS
        is_led = last in _LEADS or (last == "x" and word.isdecimal())
        if words and (is_inside or is_led or _NUMBER.fullmatch(last)):
            words[-1] += f" {word}"
        else:
            words.append(word)
        last = word
        depth += sum(map(word.count, "([{")) - sum(map(word.count, ")]}"))
    if level < _NAMES:
        return [(word, " ") for word in words]
    most = _SHORT if level == _ALL else _LONG_NAME
    long = (_PARTS.split(word) if len(word) > most else [word] for word in words)
    parts = ((number, part) for split in long for number, part in enumerate(split))
    pieces = [(part, "" if number else " ") for number, part in parts]
    if level < _ALL:
        return pieces
    return [
        (part[at : at + _SHORT], "" if at else glue)
        for part, glue in pieces
        for at in range(0, max(1, len(part)), _SHORT)
    ]
