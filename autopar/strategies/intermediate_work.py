"""Between: what passes over elements move beside products, and what cores multiply more."""

from __future__ import annotations

from typing import NamedTuple


class IntermediateWork(NamedTuple):
    """Bytes of intermediate results that passes over elements write and read, beside products and
    what is read and written once. The cores of a host have most of them in a cache: there, as many
    as its memory moves in the same time."""

    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    # FLOPs of products that its cores do besides, as of scores that a mask then leaves out.
    host_flops: float = 0.0
    host_backward_flops: float = 0.0

    def times(self, count: float) -> IntermediateWork:
        """Of so many elements, where these are of one."""
        return IntermediateWork(*(size * count for size in self))


NO_WORK = IntermediateWork()
