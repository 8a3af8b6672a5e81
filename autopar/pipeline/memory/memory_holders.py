"""Pieces of memory with the number of their holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class LiveBytes:
    """Count each piece of memory once, from its first holder until the last one lets go."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._sizes: dict[Hashable, float] = {}
        self._holders: Counter[Hashable] = Counter()

    def take(self, key: Hashable, size: float = 0.0) -> None:
        """Add a holder of some memory, which is new if it had none."""
        if not self._holders[key]:
            self._sizes[key] = size
            self.bytes += size
        self._holders[key] += 1

    def let_go(self, key: Hashable, size: float | None = None) -> None:
        """Remove a holder; `size`: the bytes to count if others still hold the memory."""
        self._holders[key] -= 1
        if not self._holders[key]:
            self.bytes -= self._sizes.pop(key)
        elif size is not None:
            self.bytes += size - self._sizes[key]
            self._sizes[key] = size

    def is_shared(self, key: Hashable) -> bool:
        return self._holders[key] > 1

    def size(self, key: Hashable) -> float:
        """Return the bytes of a piece of memory; 0 if nobody holds it."""
        return self._sizes.get(key, 0.0)
