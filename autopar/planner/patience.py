"""Patience: how long the best way is looked for.

patience = Patience(10.0)       # seconds of this process, of all its threads together
patience.begin(captured=2.0)    # from now on: capture took two
patience.is_over                # the best so far is taken, with time left to make its program
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

SECONDS = 10.0
_LAST = 0.6  # times what capture took: the program of what was chosen is made of all calls, too


@dataclass
class Patience:
    """The seconds that are given, and when they are over."""

    seconds: float = math.inf
    _until: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> Patience:
        """None: there is no end."""
        return cls(math.inf if seconds is None else float(seconds))

    def begin(self, captured: float = 0.0) -> None:
        """From now on; at most half of it is for what comes last."""
        last = min(_LAST * captured, self.seconds / 2)
        self._until = time.process_time() + self.seconds - last

    @property
    def is_over(self) -> bool:
        """Whether what was found so far is to be taken."""
        return time.process_time() >= self._until
