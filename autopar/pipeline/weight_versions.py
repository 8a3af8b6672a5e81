"""Weight versions: which version of a stage's weights each forward reads, and how many are alive.

A stage begins with version 0, and each of its updates `U` makes the next one. A micro-batch whose
gradient is applied by update u of its stage, counted from 0, reads version u - delay, and version 0
at the start. Its backward reads the version that its forward read. `Schedule.delays` are 0 where
they are not listed: nothing is stale.

>>> from autopar.pipeline.schedules import schedule
>>> versions_alive(schedule("pipedream", stages=4, microbatches=8))
(4, 3, 2, 1)
>>> versions_alive(schedule("pipedream-2bw", stages=4, microbatches=4, steps=3))
(2, 2, 2, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.pipeline.schedule import KINDS, SUM, UPDATE, Action, Schedule
from autopar.text.units import counted

Place = tuple[int, int]  # a pipe and a stage


def count_updates(schedule: Schedule) -> int:
    """Return how many updates of each stage a schedule lists; 0 if the caller makes the one."""
    actions = schedule.short.actions
    return sum(action.kind == UPDATE and action.pipe == action.stage == 0 for _, action in actions)


def update_numbers(schedule: Schedule) -> Mapping[Place, Mapping[int, int]]:
    """Return, by pipe and stage, the number of the update that applies each micro-batch."""
    numbers: dict[Place, dict[int, int]] = {}
    counts: dict[Place, int] = {}
    for _, action in schedule.actions:
        if action.kind == UPDATE:
            place = action.pipe, action.stage
            number = counts[place] = counts.get(place, -1) + 1
            numbers.setdefault(place, {}).update(dict.fromkeys(action.microbatches, number))
    return numbers


def versions_read(schedule: Schedule, rank: int) -> dict[int, set[int]]:
    """Return the versions that each forward of a rank reads, by its position; several if it joins
    micro-batches of several updates."""
    numbers = update_numbers(schedule)
    delays = schedule.delays or (0,) * schedule.stages
    return {
        at: {
            max(0, numbers[action.pipe, action.stage][microbatch] - delays[action.stage])
            for microbatch in action.microbatches
        }
        for at, action in enumerate(schedule.orders[rank])
        if action.kind == "F"
    }


def versions_alive(schedule: Schedule) -> tuple[int, ...]:
    """Return, by stage, the most versions that a rank holds at once: the newest, and those that a
    forward or backward still reads."""
    alive = [1] * schedule.stages
    for rank in range(schedule.ranks) if count_updates(schedule) else ():
        read = versions_read(schedule, rank)
        for place in schedule.local_stages(rank):
            most = max(_alive_after_each(schedule, rank, place, read))
            alive[place[1]] = max(alive[place[1]], most)
    return tuple(alive)


def _alive_after_each(
    schedule: Schedule, rank: int, place: Place, read: Mapping[int, set[int]]
) -> Iterator[int]:
    """Yield the number of versions of a stage that are alive after each action of its rank."""
    order, last_use, of_microbatch = schedule.orders[rank], dict[int, int](), dict[int, int]()
    local = [(at, a) for at, a in enumerate(order) if (a.pipe, a.stage) == place]
    for at, action in local:
        if action.kind == "F":
            of_microbatch |= dict.fromkeys(action.microbatches, min(read[at]))
        if action.kind in KINDS:
            last_use |= {of_microbatch[microbatch]: at for microbatch in action.microbatches}
    newest = 0
    yield 1
    for at, action in local:
        newest += action.kind == UPDATE
        yield 1 + sum(last_use.get(version, -1) > at for version in range(newest))


def update_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the updates that apply a gradient twice, too early or never."""
    every = any(action.kind == UPDATE for _, action in schedule.actions)
    delays = schedule.delays
    if delays and (not every or len(delays) != schedule.stages or min(delays) < 0):
        updates = "updates" if every else "no update"
        yield f"delays {' '.join(map(str, delays))}, {updates}, {counted(schedule.stages, 'stage')}"
    if not every:
        return
    for rank, order in enumerate(schedule.orders):
        complete, applied = set[tuple[int, int]](), set[tuple[int, int]]()
        for action in order:
            keys = {(action.stage, microbatch) for microbatch in action.microbatches}
            if action.kind in ("B", "W"):
                complete |= keys
            elif action.kind == SUM and any(stage == action.stage for stage, _ in applied):
                yield f"rank {rank}: {action} comes after {action.stage}{UPDATE}"
            elif action.kind == UPDATE:
                for _, microbatch in sorted(keys & applied):
                    yield f"rank {rank}: {action} applies micro-batch {microbatch} again"
                for stage, microbatch in sorted(keys - complete):
                    backward = Action("B", action.pipe, stage, (microbatch,))
                    yield f"rank {rank}: {action} comes before {backward}"
                applied |= keys
        for stage, microbatch in sorted(complete - applied):
            yield f"rank {rank}: no {UPDATE} of stage {stage} applies micro-batch {microbatch}"
    numbers = update_numbers(schedule)
    for stage in range(schedule.stages):
        counts = [len({*numbers.get((p, stage), {}).values()}) for p in range(schedule.pipes)]
        if len({*counts}) > 1:
            yield f"stage {stage} has {' and '.join(map(str, counts))} updates in its pipes"


def missing_versions(schedule: Schedule) -> Iterator[str]:
    """Yield the forwards that read a version which their stage does not have yet, or several."""
    if not count_updates(schedule):
        return
    for rank, order in enumerate(schedule.orders):
        read, newest = versions_read(schedule, rank), dict[Place, int]()
        for at, action in enumerate(order):
            place = action.pipe, action.stage
            if action.kind == UPDATE:
                newest[place] = newest.get(place, 0) + 1
            elif action.kind == "F":
                wanted, latest = read[at], newest.get(place, 0)
                if len(wanted) > 1:
                    yield f"rank {rank}: {action} reads versions {sorted(wanted)} at once"
                elif max(wanted) > latest:
                    yield f"rank {rank}: {action} reads version {max(wanted)}, there is {latest}"
