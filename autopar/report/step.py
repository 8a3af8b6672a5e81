"""Step: the parts of the time of a predicted step, and parts of a whole as a bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.drawing import Drawing
from autopar.planner.candidate import Candidate
from autopar.units import seconds_text

_WIDTH = 960.0


@dataclass(frozen=True)
class Share:
    """A part of a whole."""

    name: str
    kind: str
    size: float
    text: str


def seconds(candidate: Candidate) -> list[Share]:
    """What a step's predicted time is made of."""
    cost = candidate.cost
    parts = {
        ("forward", "F0"): cost.compute * cost.forward / ((cost.forward + cost.backward) or 1.0),
        ("backward", "B0"): cost.compute * cost.backward / ((cost.forward + cost.backward) or 1.0),
        ("communication that nothing hides", "shown"): cost.exposed,
        ("bubble", "bubble"): cost.bubble,
        ("updates on the host", "sync"): cost.updated,
    }
    return [Share(*key, size, seconds_text(size)) for key, size in parts.items() if size > 0]


def bar(shares: Sequence[Share], whole: float, label: str) -> Drawing:
    """Parts beside each other, of a whole."""
    picture = Drawing(_WIDTH, 18, label)
    picture.box(0, 0, _WIDTH, 18, "idle")
    x = 0.0
    for share in shares:
        width = share.size / whole * _WIDTH if whole else 0.0
        picture.box(x, 0, width, 18, share.kind, title=f"{share.name}: {share.text}")
        x += width
    return picture
