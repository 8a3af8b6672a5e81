"""Interleaved 1F1B (Narayanan et al. 2021): each rank holds `chunks` stages, p apart.

Micro-batches go in groups of p: a rank does a group on its first chunk, then on its second, ...
When p divides m the makespan exceeds m(F + B) by (p - 1)(F + B) / chunks.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import (
    Period,
    generator,
    in_turn,
    leave_out,
    positive,
    walk_chunks,
)


@generator(
    "interleaved", {"chunks": 2}, period=lambda stages, chunks=2: Period(stages, 4 * stages + 2)
)
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    positive("interleaved", "chunks", chunks)
    walk, orders = walk_chunks(stages, microbatches, chunks), []
    for rank in range(stages):
        forwards = [Action("F", 0, chunk * stages + rank, (m,)) for chunk, m in walk]
        backwards = [
            Action("B", 0, (chunks - 1 - chunk) * stages + rank, (m,)) for chunk, m in walk
        ]
        ahead = min(2 * (stages - 1 - rank) + (chunks - 1) * stages, len(walk))
        orders.append(leave_out(in_turn(forwards, backwards, ahead), microbatches))
    placement = [stage % stages for stage in range(stages * chunks)]
    return make("interleaved", microbatches, [placement], orders, chunks=chunks)
