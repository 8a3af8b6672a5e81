"""Collective counts: how often a collective pays the latency of a link, and moves its bytes.

>>> latency_count("all_reduce", 1024), latency_count("all_gather", 1024)
(20.0, 10.0)
>>> volume_count("all_reduce", 4)
1.5

An all-reduce is a reduce-scatter and then an all-gather: it costs what the two cost. Each of these
halves or doubles what is exchanged log2(p) times (recursive halving and doubling, Rabenseifner; the
trees of NCCL), which moves as many bytes as a ring and waits for fewer messages than its p - 1. An
all-to-all has p - 1 messages on the way at once, and waits as often as a gather does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# Of those that one algorithm carries out: how often it goes through all ranks.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
KINDS = (*PASSES, "all_to_all", "shift", "broadcast")


def latency_count(kind: str, ranks: Any, log2: Callable[[Any], Any] = math.log2) -> Any:
    """Return how many messages of a collective over `ranks` wait for one another.

    `ranks` may be a number or a symbol, of which `log2` then takes the logarithm."""
    if kind == "shift":  # to a neighbour
        return 1
    return PASSES.get(kind, 1) * log2(ranks)


def volume_count(kind: str, ranks: Any, log2: Callable[[Any], Any] = math.log2) -> Any:
    """Return how often a collective moves V: the larger of what a rank holds before and after."""
    if kind == "shift":
        return 1
    if kind == "broadcast":
        return log2(ranks)
    return PASSES.get(kind, 1) * (ranks - 1) / ranks
