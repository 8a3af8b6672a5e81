"""Memory items: the things of which a stage holds some number, and the kinds shown to people.

The bytes of a rank at one time are counts of items times their sizes (`step_memory.py`): so many
micro-batches of activations, so many message buffers, one running action.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, auto


class MemoryItem(IntEnum):
    """Name the items that a stage holds, and the actions that it runs."""

    KEPT = 0  # activations of a micro-batch, from the end of F to B or I
    RECEIVED = auto()  # an activation from the stage before, until B or I is done (F in a call)
    RETURNED = auto()  # a gradient from the stage after, until B or I is done
    SENT = auto()  # an activation that may not have arrived
    GIVEN = auto()  # a gradient that may not have arrived
    HALVES = auto()  # the inputs of the gradients of weights, from I to W
    STATISTICS = auto()  # changes of buffers, to the end of the step
    EARLY = auto()  # 1 if there are gradients of parameters that I computes
    LATE = auto()  # 1 if there are all others
    # 1 for each group of copies that live a use and that F, B or I leave alive.
    LEFT = auto()
    LEFT_1 = auto()
    LEFT_2 = auto()
    LEFT_3 = auto()
    F = auto()  # running actions; up to `I_AGAIN`, before the copies that they read are gathered
    B = auto()  # the first run, in which gradients of parameters are allocated
    B_AGAIN = auto()
    B_LAST = auto()  # the last run, in which gradients are summed
    B_ONLY = auto()  # the first and last run
    I = auto()  # noqa: E741
    I_AGAIN = auto()
    F_READING = auto()  # running actions with the copies that they read
    B_READING = auto()
    B_AGAIN_READING = auto()
    B_LAST_READING = auto()
    B_ONLY_READING = auto()
    I_READING = auto()
    I_AGAIN_READING = auto()
    W = auto()
    W_AGAIN = auto()
    W_LAST = auto()
    W_ONLY = auto()

    def of_run(self, *, is_later: bool, is_last: bool) -> MemoryItem:
        """Return the item of a later or last run, from that of the first run."""
        return MemoryItem(self + (is_later + is_last if is_later else 3 * is_last))


READING = MemoryItem.F_READING - MemoryItem.F
# Kinds of bytes in reports; a running action has some of each.
KINDS = ("activations", "messages", "gradients", "gathered", "working")
ITEMS_OF_KIND = {
    "activations": [MemoryItem.KEPT, MemoryItem.HALVES, MemoryItem.STATISTICS],
    "messages": [MemoryItem.RECEIVED, MemoryItem.RETURNED, MemoryItem.SENT, MemoryItem.GIVEN],
    "gradients": [MemoryItem.EARLY, MemoryItem.LATE],
    "gathered": [*map(MemoryItem, range(MemoryItem.LEFT, MemoryItem.F))],
}
BytesByKind = Mapping[str, float]
