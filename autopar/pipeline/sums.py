"""Gradient sums as actions of a schedule: where each rank starts to sum a stage's gradient.

>>> from autopar.pipeline.schedules import schedule
>>> print(*place_sums(schedule("1f1b", stages=2, microbatches=2), early={1}).orders[1])
1F0 1B0 1F1 1B1 1REDUCE_GRAD

The replicas of a stage sum its gradient: those of other pipes, and those inside of a stage. The sum
starts early, right after the last action that computes the gradient on a rank, or at the end of the
rank's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autopar.pipeline.schedule import SUM, UPDATE, Action, RepeatedOrders, Schedule

Order = tuple[Action, ...]


def without_sums(schedule: Schedule) -> Schedule:
    """Return the schedule with no sum listed: each starts when its gradient is complete."""
    if all(action.kind != SUM for _, action in schedule.short.actions):
        return schedule

    def left(orders: Sequence[Order]) -> tuple[Order, ...]:
        return tuple(tuple(a for a in order if a.kind != SUM) for order in orders)

    return _changed(schedule, lambda plain: replace(plain, orders=left(plain.orders)))


def place_sums(schedule: Schedule, early: Collection[int]) -> Schedule:
    """Return the schedule with every sum listed: early for these stages, at the end for others."""
    plain = without_sums(schedule)
    return _changed(
        plain,
        lambda variant: replace(
            variant, orders=tuple(_with_sums(variant, rank, early) for rank in range(variant.ranks))
        ),
    )


def _with_sums(schedule: Schedule, rank: int, early: Collection[int]) -> Order:
    order = schedule.orders[rank]
    computing = schedule.gradient_positions[rank]
    after: dict[int, list[Action]] = {}  # by position of an action, the sums that follow it
    for pipe, stage in sorted(schedule.local_stages(rank), key=lambda pair: pair[1]):
        last = computing.get(stage, (-1,))[-1] if stage in early else len(order) - 1
        while last >= 0 and order[last].kind == UPDATE:  # which follow the sum
            last -= 1
        after.setdefault(last, []).append(Action(SUM, pipe, stage, ()))
    placed = after.get(-1, [])
    for at, action in enumerate(order):
        placed += [action, *after.get(at, ())]
    return tuple(placed)


def _changed(schedule: Schedule, change: Callable[[Schedule], Schedule]) -> Schedule:
    """Return the schedule with its orders changed, those that are not listed when they are."""
    orders = schedule.orders
    if not isinstance(orders, RepeatedOrders):
        return change(schedule)
    repeated = RepeatedOrders(
        change(orders.short),
        orders.period,
        orders.repeats,
        lambda: change(replace(schedule, orders=tuple(orders))),
    )
    return replace(schedule, orders=repeated)
