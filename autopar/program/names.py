"""Names with a hole for the number of a block: `layers.{0..95}.up.weight`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Numbered:
    """A name that each block has with another number."""

    before: str
    first: int
    step: int
    after: str

    def of(self, block: int) -> str:
        """Return the name in one of the blocks, which are counted from 0."""
        return f"{self.before}{self.first + block * self.step}{self.after}"

    def listed(self, first: int, count: int) -> str:
        """Return the names of a row of blocks: `layers.{0..95}`."""
        start, end = (self.first + block * self.step for block in (first, first + count - 1))
        inside = f"{start}" if count == 1 else f"{{{start}..{end}}}"
        return f"{self.before}{inside}{self.after}"


def numbered(names: Sequence[str]) -> tuple[Numbered, list[int]] | None:
    """Return what names in consecutive blocks have in common, and the blocks that they are of.

    Blocks may be missing between them. None: the names do not differ in one number alone.
    """
    rows = [_NUMBER.split(name) for name in names]
    if len({len(row) for row in rows}) > 1:
        return None
    differing = [at for at, column in enumerate(zip(*rows)) if len({*column}) > 1]
    if len(differing) != 1 or not differing[0] % 2:
        return None
    at = differing[0]
    texts = [row[at] for row in rows]
    numbers = [int(text) for text in texts]
    steps = [later - earlier for earlier, later in pairwise(numbers)]
    step = min(steps, key=abs)
    is_regular = step and not any(other % step or other // step < 1 for other in steps)
    if not is_regular or any(str(number) != text for number, text in zip(numbers, texts)):
        return None
    name = Numbered("".join(rows[0][:at]), numbers[0], step, "".join(rows[0][at + 1 :]))
    return name, [(number - numbers[0]) // step for number in numbers]


def path_above(path: str, paths: Collection[str]) -> str | None:
    """Return which of some modules a module or parameter is in, or is. None: in none of them."""
    parts = path.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((prefix for prefix in above if prefix in paths), None)
