"""Interleaved zero bubble (Qi et al. 2024, ZB-1P): `interleaved` with split backward.

A rank runs p - 1 - r + (v - 1) p forwards of its v chunks ahead, then a forward and an I in turn,
and puts each W off by r actions of that kind: the last ranks fill with W what the first leave idle.
"""

from __future__ import annotations

from autopar.pipeline.schedule import Action, Schedule, make
from autopar.pipeline.schedules.registry import Period, generator, leave_out, positive, walk_chunks


@generator(
    "interleaved-zb", {"chunks": 2}, period=lambda stages, chunks=2: Period(stages, 4 * stages + 2)
)
def interleaved_zb(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    positive("interleaved-zb", "chunks", chunks)
    walk, orders = walk_chunks(stages, microbatches, chunks), []
    for rank in range(stages):
        ahead = stages - 1 - rank + (chunks - 1) * stages
        order = [Action("F", 0, chunk * stages + rank, (m,)) for chunk, m in walk[:ahead]]
        back = [((chunks - 1 - chunk) * stages + rank, m) for chunk, m in walk]
        for number, (stage, m) in enumerate(back):
            for chunk, later in walk[ahead + number : ahead + number + 1]:
                order.append(Action("F", 0, chunk * stages + rank, (later,)))
            order.append(Action("I", 0, stage, (m,)))
            if number >= rank:
                waiting, of = back[number - rank]
                order.append(Action("W", 0, waiting, (of,)))
        order += [Action("W", 0, stage, (m,)) for stage, m in back[len(back) - rank :] if rank]
        orders.append(leave_out(order, microbatches))
    placement = [stage % stages for stage in range(stages * chunks)]
    return make("interleaved-zb", microbatches, [placement], orders, chunks=chunks)
