"""Setting: what every pass is told besides the graph."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.capture.captured import Captured
from autopar.collectives import Price
from autopar.mesh import Mesh
from autopar.search.decisions import Decisions


@dataclass(frozen=True)
class Setting:
    """The program that is rewritten, what was decided about it, and what collectives cost."""

    captured: Captured
    decisions: Decisions
    price: Price

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh
