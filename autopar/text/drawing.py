"""Drawings of lines, boxes and words as SVG, in classes to which a style gives colours.

>>> drawing = Drawing(100, 20, "two boxes")
>>> drawing.box(0, 0, 40, 20, "forward", title="stage 0")
>>> page = str(drawing)                      # inside of a page
>>> Path("boxes.svg").write_text(drawing.file())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape as escaped
from importlib.resources import files
from itertools import pairwise

from autopar.text.units import printable_text

Point = tuple[float, float]
WIDE, NARROW = 960.0, 360.0  # of pictures: for a screen, for a phone
_LETTER = 6.2  # the width of one, on average


def style() -> str:
    """Return the style sheet of drawings, with colours for light and dark pages."""
    return files("autopar").joinpath("drawing.css").read_text()


class Drawing:
    """A picture of `width` times `height`, with a sentence for those who do not see it."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = ""
    ) -> None:
        """Draw a filled rectangle; `title` is shown to a reader who points at it."""
        inside = f"<title>{escape(title)}</title>" if title else ""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{kind}" {place}>{inside}</rect>')

    def boxes(self, places: Sequence[tuple[float, float, float, float]], kind: str) -> None:
        """Draw many rectangles of one kind as one shape: x, y, width, height of each."""
        way = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in places)
        if way:
            self._parts.append(f'<path class="{kind}" d="{way}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        place = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self._parts.append(f'<circle class="{kind}" {place}>{inside}</circle>')

    def line(self, points: Sequence[Point], kind: str) -> None:
        """Draw a line straight from point to point."""
        way = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{way}"/>')

    def area(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        """Draw the filled polygon of some points."""
        inside = f"<title>{escape(title)}</title>" if title else ""
        way = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polygon class="{kind}" points="{way}">{inside}</polygon>')

    def text(self, x: float, y: float, words: str, kind: str = "words") -> None:
        self._parts.append(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>')

    def __str__(self) -> str:
        return self._whole("")

    def file(self) -> str:
        """Return the drawing as an SVG file with its colours."""
        # Words change their colour on dark pages, so the paper under them does too.
        paper = '<rect class="paper" width="100%" height="100%"/>'
        first = f"<style>{style()}</style>{paper}"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{self._whole(first)}'

    def _whole(self, first: str) -> str:
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        name = f'class="drawing" role="img" aria-label="{escape(self.label)}"'
        inside = "".join([f"<title>{escape(self.label)}</title>", first, *self._parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {name} {size}>{inside}</svg>'


class Axis:
    """A mapping from values to places in a picture, with round values as ticks."""

    def __init__(self, least: float, most: float, start: float, end: float) -> None:
        self._least, self._span = least, (most - least) or 1.0
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        return self._start + (value - self._least) / self._span * (self._end - self._start)

    def ticks(self, count: int = 6) -> list[float]:
        """Return about `count` round values, from the least to the most."""
        each = self._span / count
        power = 10.0 ** math.floor(math.log10(each))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= each)
        first = math.ceil(self._least / step)
        last = math.floor((self._least + self._span) / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def labels(
        self, count: int, text: Callable[[float], str], room: float = 0.0
    ) -> list[tuple[float, str]]:
        """Return at most about `count` ticks with their texts: no two read the same, and each has
        `room` beside the next where it is written below an axis."""
        for wanted in range(count, 1, -1):
            labels = [(value, text(value)) for value in self.ticks(wanted)]
            is_distinct = len({words for _, words in labels}) == len(labels)
            widest = max((text_width(words) for _, words in labels), default=0.0) + room
            places = [self.at(value) for value, _ in labels]
            if is_distinct and not (room and any(b - a < widest for a, b in pairwise(places))):
                return labels
        return labels[:1]


def text_width(words: str) -> float:
    """Return about how wide words are in a picture."""
    return _LETTER * len(words)


def legend_places(
    names: Sequence[str], left: float, right: float, sign: float = 10.0
) -> list[tuple[str, float, float]]:
    """Return each name of a legend with the place of its sign, in as many rows as they need."""
    x, y, places = left, 10.0, list[tuple[str, float, float]]()
    for name in names:
        width = sign + 18 + text_width(name)
        if x > left and x + width > right:
            x, y = left, y + 16
        places.append((name, x, y))
        x += width
    return places


def escape(words: str) -> str:
    """Return words as they stand in an SVG file."""
    return escaped(printable_text(words))


def _n(value: float) -> str:
    """Return a number with at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
