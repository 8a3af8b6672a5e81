"""The changes of a situation that `plan.what_if` prices, as they were asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from autopar.text.units import read_bytes, scaled

Change = float | str  # what something becomes, or how many times as much, as "2x"
UNITS = {"bandwidth": "B/s", "inside": "B/s", "memory": "B"}  # the changes that have a unit


@dataclass(frozen=True)
class Changes:
    """The changes that a user asks for, as they were given."""

    nodes: Change | None
    bandwidth: Change | None
    inside: Change | None
    batch: Change | None
    sequence: Change | None
    memory: Change | None

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{n} {_text(n, v)}" for n, v in values.items() if v is not None)


CHANGES = tuple(field.name for field in fields(Changes))


def _text(name: str, change: Any) -> str:
    """Return a change as people write it."""
    if isinstance(change, str) or not math.isfinite(read_bytes(change)):
        return str(change)
    return scaled(change, UNITS[name]) if name in UNITS else f"{change:.15g}"
