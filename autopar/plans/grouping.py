"""Grouping: equal lines of repeated blocks as one line, `layers.{0..47}.up.weight`.

>>> grouped([("layers.0.up", "a"), ("layers.1.up", "a"), ("layers.2.up", "b"), ("head", "a")])
[('layers.{0..1}.up', 'a', 2), ('layers.2.up', 'b', 1), ('head', 'a', 1)]
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

Content = TypeVar("Content", bound=Hashable)
_NUMBER = re.compile(r"(?:^|(?<=[._]))(\d+)(?=\.| |$)")
_RUNS = 5  # of numbers, that are written out


def grouped(lines: Iterable[tuple[str, Content]]) -> list[tuple[str, Content, int]]:
    """(names, content, how many): names that differ in their first number, with equal content."""
    found: dict[tuple[str, str, Content], list[int]] = {}
    for name, content in lines:
        match = _NUMBER.search(name)
        if match is None:
            found.setdefault((name, "", content), []).append(-1)
        else:
            key = name[: match.start()], name[match.end() :], content
            found.setdefault(key, []).append(int(match[0]))
    return [
        (f"{before}{_ranges(numbers)}{after}", content, len(numbers))
        for (before, after, content), numbers in found.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """`{0..3, 7}` for 0, 1, 2, 3, 7."""
    distinct = sorted({number for number in numbers if number >= 0})
    if not distinct:
        return ""
    runs: list[list[int]] = []
    for number in distinct:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}..{b}" for a, b in runs]
    if len(texts) > _RUNS:
        texts[_RUNS - 1 :] = ["...", texts[-1]]
    return texts[0] if len(distinct) == 1 else "{" + ", ".join(texts) + "}"
