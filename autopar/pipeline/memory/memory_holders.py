"""Pieces of memory with those who hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Held:
    """Counts each piece once, from the first who holds it to the last who lets go."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._sizes: dict[Hashable, float] = {}
        self._holders: Counter[Hashable] = Counter()

    def take(self, key: Hashable, size: float = 0.0) -> None:
        """Hold some memory, which is new unless somebody holds it."""
        if not self._holders[key]:
            self._sizes[key] = size
            self.bytes += size
        self._holders[key] += 1

    def let_go(self, key: Hashable, size: float | None = None) -> None:
        """`size`: for those who hold it still, if it was others' to count."""
        self._holders[key] -= 1
        if not self._holders[key]:
            self.bytes -= self._sizes.pop(key)
        elif size is not None:
            self.bytes += size - self._sizes[key]
            self._sizes[key] = size

    def is_shared(self, key: Hashable) -> bool:
        return self._holders[key] > 1

    def size(self, key: Hashable) -> float:
        """Of what somebody holds."""
        return self._sizes.get(key, 0.0)
