"""Chimera (Li and Hoefler 2021): pipes in opposite directions that fill each other's bubbles.

Actions are laid out in slots as if F and B took one slot each; a rank does its actions in the order
of their slots. In a unit of up to p micro-batches, number j of a pipe at stage s has F in slot
2j + s and B in slot 2j + 2p - 1 - s; for even p no rank has two actions in a slot. More than p
micro-batches are scaled in one of four ways:

- direct: units 2p slots apart, one into the other;
- doubling: units of 2p micro-batches 3p slots apart, forwards in pairs, backwards alone;
- halving: doubling with half micro-batches, F on the whole and B on each half;
- list: no units; each rank takes by a fixed rule what is ready.
"""

from __future__ import annotations

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Action, Option, Schedule, make
from autopar.pipeline.schedules.chimera_placement import chimera_placement, shares
from autopar.pipeline.schedules.list_scheduling import ListSchedule, greedy
from autopar.pipeline.schedules.registry import Period, generator
from autopar.pipeline.simulation.action_costs import Costs, StageTimes, plain, single, stage_times

SCALES = ("direct", "doubling", "halving", "list")
Slotted = tuple[int, Action]


def _period(stages: int, scale: str = "direct", **options: object) -> Period | None:
    """Return the micro-batches of a unit; a list has no units."""
    units = {"direct": stages, "doubling": 2 * stages, "halving": stages}
    unit = units.get(scale)
    return None if unit is None else Period(unit, 4 * unit)


@generator("chimera", *({"scale": scale} for scale in SCALES), period=_period)
def chimera(
    stages: int,
    microbatches: int,
    pipes: int = 2,
    scale: str = "direct",
    forward: Costs = 1,
    backward: Costs = 2,
    latency: float = 0,
) -> Schedule:
    """Return Chimera's schedule; only `scale="list"` depends on the times that are given."""
    placement = chimera_placement("chimera", stages, pipes)
    if scale not in SCALES:
        raise InvalidInput(
            "chimera scales beyond p micro-batches in one of four ways",
            got=f"scale={scale!r}",
            remedy=f"choose one of {', '.join(SCALES)}",
        )
    parts = 2 if scale == "halving" else 1
    options: dict[str, Option] = {"pipes": pipes, "scale": scale}
    if scale == "list":
        times = stage_times(stages, forward, backward, backward_weight=None)
        delay = single("latency", latency)
        orders = _list(placement, shares(0, microbatches, pipes), times, delay)
        options |= {"forward": plain(forward), "backward": plain(backward), "latency": latency}
    else:
        slots: list[list[Slotted]] = [[] for _ in range(stages)]
        layout = _direct if scale == "direct" else _doubling
        layout(slots, placement, microbatches * parts)
        orders = [[action for _, action in sorted(row, key=lambda pair: pair[0])] for row in slots]
    return make("chimera", microbatches, placement, orders, parts, **options)


def _list(
    placement: list[list[int]], runs: list[range], times: StageTimes, latency: float
) -> list[list[Action]]:
    """Return orders in which each rank runs, of what is ready, the following.

    First a forward of the deepest stage, then the oldest, while that stage keeps fewer than p - s
    micro-batches and the rank fewer than p; else a backward of the stage nearest to the input. For
    even m >= p and B = 2F the makespan exceeds m(F + B) by (p - 2) B with at most p micro-batches
    on a rank. With latency one more is allowed: it hides the time on the way.
    """
    limit = len(placement[0]) + (latency > 0)
    for reserve in (0, 1):  # without a reserve the ranks may come to wait for each other
        rule = greedy(placement, ("F", "B"), limit, reserve=reserve, tapers=True)
        orders = ListSchedule(placement, runs, times, latency, rule, ("F", "B")).play()
        if orders is not None:
            return orders
    raise AssertionError("with a reserve no rank waits forever")


def _direct(slots: list[list[Slotted]], placement: list[list[int]], microbatches: int) -> None:
    stages = len(slots)
    for unit, first in enumerate(range(0, microbatches, stages)):
        _plain_unit(slots, placement, first, min(stages, microbatches - first), 2 * stages * unit)


def _plain_unit(
    slots: list[list[Slotted]], placement: list[list[int]], first: int, count: int, start: int
) -> None:
    stages = len(slots)
    for pipe, run in enumerate(shares(first, count, len(placement))):
        for stage, rank in enumerate(placement[pipe]):
            for number, microbatch in enumerate(run):
                begin = start + 2 * number
                slots[rank].append((begin + stage, Action("F", pipe, stage, (microbatch,))))
                backward = begin + 2 * stages - 1 - stage
                slots[rank].append((backward, Action("B", pipe, stage, (microbatch,))))


def _doubling(slots: list[list[Slotted]], placement: list[list[int]], microbatches: int) -> None:
    """Fill slots by units of 2p: two forwards or one backward in a slot; up to p at the end plain.

    The first unit's pairs go as single forwards, so that the next rank can start on the first.
    """
    stages = len(slots)
    for unit, first in enumerate(range(0, microbatches, 2 * stages)):
        start, count = 3 * stages * unit, min(2 * stages, microbatches - first)
        if count <= stages:
            _plain_unit(slots, placement, first, count, start)
            continue
        for pipe, run in enumerate(shares(first, count, len(placement))):
            pairs = [tuple(run[i : i + 2]) for i in range(0, len(run), 2)]
            for stage, rank in enumerate(placement[pipe]):
                for number, pair in enumerate(pairs):
                    slot = start + 2 * number + stage
                    for group in [pair] if unit else [(microbatch,) for microbatch in pair]:
                        slots[rank].append((slot, Action("F", pipe, stage, group)))
                for number, microbatch in enumerate(run):
                    slot = start + 2 * number + 2 * stages - 1 - stage
                    slots[rank].append((slot, Action("B", pipe, stage, (microbatch,))))
