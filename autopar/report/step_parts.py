"""The parts of a predicted step's time, and shares of a whole as a bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.candidates.candidate import Candidate
from autopar.text.drawing import WIDE, Drawing
from autopar.text.units import seconds_text


@dataclass(frozen=True)
class BarShare:
    """A named share of a whole."""

    name: str
    kind: str
    size: float
    text: str


def step_parts(candidate: Candidate) -> list[BarShare]:
    """List what the predicted time of a step consists of."""
    cost = candidate.cost
    parts = {
        ("forward", "F0"): cost.compute * cost.forward / ((cost.forward + cost.backward) or 1.0),
        ("backward", "B0"): cost.compute * cost.backward / ((cost.forward + cost.backward) or 1.0),
        ("communication that nothing hides", "shown"): cost.exposed,
        ("bubble", "bubble"): cost.bubble,
        ("updates on the host", "sync"): cost.updated,
    }
    return [BarShare(*key, size, seconds_text(size)) for key, size in parts.items() if size > 0]


def draw_bar(shares: Sequence[BarShare], whole: float, label: str) -> Drawing:
    """Draw shares next to each other."""
    picture = Drawing(WIDE, 18, label)
    picture.box(0, 0, WIDE, 18, "track")
    x = 0.0
    for share in shares:
        width = share.size / whole * WIDE if whole else 0.0
        picture.box(x, 0, width, 18, share.kind, title=f"{share.name}: {share.text}")
        x += width
    return picture
