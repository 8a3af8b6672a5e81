"""StageHardware: the machines and links of a stage, which may be of several kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StageHardware:
    """Describe the machines on which the copies of a stage run, and their links."""

    kinds: tuple[int, ...] = (0,)  # indices of the kinds of machines
    bandwidth: float = math.inf  # of the slowest link from the stage before
    spare: float = 0.0  # bytes that its devices have beyond what every device has

    @property
    def without_links(self) -> StageHardware:
        """Return the hardware with links that take no time."""
        return replace(self, bandwidth=math.inf)


ANYWHERE = StageHardware()
