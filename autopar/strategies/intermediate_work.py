"""Intermediate work: what an operator moves and multiplies beside its products and results."""

from __future__ import annotations

from typing import NamedTuple


class IntermediateWork(NamedTuple):
    """Bytes of intermediate results that passes over elements write and read.

    A host's cores have most of them in a cache. Its bytes are those that memory moves meanwhile.
    """

    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    # FLOPs that a host's cores do in vain, as of scores that a mask then leaves out.
    host_flops: float = 0.0
    host_backward_flops: float = 0.0

    def times(self, count: float) -> IntermediateWork:
        """Return the work of `count` elements, where this is the work of one."""
        return IntermediateWork(*(size * count for size in self))


NO_WORK = IntermediateWork()
