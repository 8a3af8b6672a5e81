"""Standing: where stages stand, on machines and links that may be of several kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Standing:
    """Where a stage stands, each of its copies."""

    kinds: tuple[int, ...] = (0,)  # of machines
    bandwidth: float = math.inf  # of the slowest of the links from the stage before
    spare: float = 0.0  # bytes that its devices have beyond what every device has

    @property
    def near(self) -> Standing:
        """The same with nothing to wait for."""
        return replace(self, bandwidth=math.inf)


ANYWHERE = Standing()
