"""Collective: a movement with other ranks in a step, as it is priced and counted."""

from __future__ import annotations

from typing import Literal, NamedTuple

from autopar.cost.rooflines import COLLECTIVES

When = Literal["forward", "backward", "step"]  # in each run, or once a step


class Collective(NamedTuple):
    """One collective of a step."""

    kind: str
    axes: tuple[str, ...]
    bytes: float  # of the larger of what one rank holds before and after
    when: When
    what: str = ""  # that is moved, of parameters

    def sent(self, ranks: int) -> float:
        """Return the bytes that each of `ranks` sends."""
        return float(COLLECTIVES[self.kind](p=ranks, V=self.bytes, B=1.0, a=0.0))
