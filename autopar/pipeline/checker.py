r"""Proves a schedule sound before anything runs, or names the actions that are not.

>>> from autopar.pipeline import from_text
>>> orders = "microbatches: 1\npipe 0: 0 1\nrank 0: 0F0 0B0\nrank 1: 1B0 1F0"
>>> from_text(orders)  # doctest: +IGNORE_EXCEPTION_DETAIL
Traceback (most recent call last):
autopar.errors.InvalidInput: a micro-batch's backward on a stage follows its forward there
  given:  rank 1: 1B0 comes before 1F0
  remedy: put the forward first

A sound schedule is complete (each micro-batch passes each stage of one pipe, forward once and
backward once), ordered on each rank, matched (what one stage sends together, the next one receives
together) and free of deadlock as the executor runs it: a rank does its list in order, sends never
block, and an action blocks until its input is there. Where updates are listed, each gradient is
applied once, to weights as old as `delays` promise: no forward reads a version that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import KINDS, MOST_UNLISTED, SUM, UPDATE, Action, Schedule
from autopar.pipeline.simulation.action_times import time_actions
from autopar.pipeline.weight_versions import missing_versions, update_faults
from autopar.text.units import counted

SHOWN = 6  # offences in a message


def check(schedule: Schedule, *, of_call: bool = False) -> None:
    """Raise `InvalidInput` with the offending actions unless `schedule` is sound.

    `of_call`: a schedule that only goes forward is sound, too.
    """
    goes_back = schedule.goes_back or not of_call
    for rule, remedy, offences in (
        ("every stage of every pipe is on one rank", "correct the placement", _placement),
        ("a schedule lists an F for each micro-batch on each stage",
         "add what is missing, or correct the numbers", _listed),
        ("an action names a stage of its rank and micro-batches of the step",
         "move the action to the rank that holds its stage, or correct its numbers", _named),
        ("a micro-batch goes through one pipe", "keep all its actions in one pipe", _one_pipe),
        ("each micro-batch has one F, and one B or one I and one W, on each stage of its pipe",
         "add what is missing, remove what is doubled", partial(_complete, goes_back=goes_back)),
        ("every rank runs something in a step",
         "give it a stage and micro-batches, or leave it out of the schedule", _idle),
        ("a micro-batch's backward on a stage follows its forward there",
         "put the forward first", _backward_follows),
        ("slices of a sequence go through a stage in order, and back from the last to the first",
         "give the forwards in the order of the slices, the backwards in reverse", _sliced),
        ("W follows I for the same micro-batches on a stage", "put the I first", _weight_follows),
        ("a rank sums a stage's gradient at most once, after its last B or W on the stage",
         "move the REDUCE_GRAD behind them, and remove others", _sums),
        ("updates of a stage apply the gradient of each micro-batch once, after its B or W; delays "
         "belong to updates, and are one for each stage",
         "put the U behind the backwards of its micro-batches, and name each once", update_faults),
        ("a forward reads weights that its stage has: those of as many updates ago as delays say, "
         "counted from the update that applies its gradient",
         "put the U that makes the version before the F, or give the stage a longer delay",
         missing_versions),
        ("micro-batches that one stage sends together are received together by the next",
         "join them alike on all stages", _matched),
        ("a forward overlaps with the backward of another micro-batch that follows it",
         "write (1F2;0B1)OVERLAP_F_B", _overlaps),
        ("a schedule has no deadlock: ranks do not wait for each other in a circle",
         "put the action that is waited for earlier in its rank's order", _deadlock),
    ):  # fmt: skip
        shown = []
        for offence in offences(schedule):
            shown.append(offence)
            if len(shown) > SHOWN:
                shown[-1] = "..."
                break
        if shown:
            raise InvalidInput(rule, got="\n".join(shown), remedy=remedy)


def _placement(schedule: Schedule) -> Iterator[str]:
    if schedule.microbatches < 1 or schedule.parts < 1:
        batches = counted(schedule.microbatches, "micro-batch")
        yield f"{batches} in {counted(schedule.parts, 'part')}"
    if not schedule.placement or not schedule.placement[0]:
        yield "no stage"
        return
    held: dict[tuple[int, int], int] = {}
    for pipe, ranks in enumerate(schedule.placement):
        if len(ranks) != schedule.stages:
            yield f"pipe {pipe} has {counted(len(ranks), 'stage')}, pipe 0 has {schedule.stages}"
        for stage, rank in enumerate(ranks):
            if not 0 <= rank < schedule.ranks:
                yield f"stage {stage} of pipe {pipe} on rank {rank} of {schedule.ranks}"
            other = held.setdefault((rank, stage), pipe)
            if other != pipe:
                yield f"rank {rank} holds stage {stage} twice, of pipes {other} and {pipe}"


def _listed(schedule: Schedule) -> Iterator[str]:
    """Refuse numbers of a header that actions do not bear out, before others count up to them."""
    listed = sum(len(action.microbatches) for _, action in schedule.actions)
    wanted = schedule.all_parts * schedule.stages
    if wanted > max(MOST_UNLISTED, listed):
        batches, stages = counted(schedule.all_parts, "micro-batch"), schedule.stages
        yield f"{counted(listed, 'action')} for {batches} on {counted(stages, 'stage')}"


def _named(schedule: Schedule) -> Iterator[str]:
    placement, pipes, stages = schedule.placement, schedule.pipes, schedule.stages
    parts = schedule.all_parts
    for rank, action in schedule.actions:
        pipe, stage, microbatches = action.pipe, action.stage, action.microbatches
        if action.kind not in (*KINDS, SUM, UPDATE):
            yield f"rank {rank}: {action}: kind is not one of {', '.join((*KINDS, SUM, UPDATE))}"
        elif not (0 <= pipe < pipes and 0 <= stage < stages):
            of_stages = counted(stages, "stage")
            yield f"rank {rank}: {action}: there are {counted(pipes, 'pipe')} of {of_stages}"
        elif placement[pipe][stage] != rank:
            yield f"rank {rank}: {action} belongs on rank {placement[pipe][stage]}"
        elif action.kind == SUM:
            if microbatches:
                yield f"rank {rank}: {action}: a sum is of all micro-batches, and names none"
        elif not microbatches or min(microbatches) < 0 or max(microbatches) >= parts:
            yield f"rank {rank}: {action}: micro-batches are 0 to {parts - 1}"
        elif len(set(microbatches)) != len(microbatches):
            yield f"rank {rank}: {action} names a micro-batch twice"


def _one_pipe(schedule: Schedule) -> Iterator[str]:
    first: dict[int, tuple[int, Action]] = {}
    for _, action in schedule.actions:
        pipe = action.pipe
        for microbatch in action.microbatches:
            other = first.setdefault(microbatch, (pipe, action))
            if other[0] != pipe:
                yield f"micro-batch {microbatch}: {other[1]} and {action}"


def _complete(schedule: Schedule, *, goes_back: bool) -> Iterator[str]:
    parts, stages = schedule.all_parts, schedule.stages
    counts = {kind: [0] * (parts * stages) for kind in KINDS}
    for _, action in schedule.actions:
        if action.kind not in KINDS:
            continue
        done, base = counts[action.kind], action.stage * parts
        for microbatch in action.microbatches:
            done[base + microbatch] += 1
    ones = [1] * (parts * stages)
    halves = [whole + half for whole, half in zip(counts["B"], counts["I"])]
    if counts["F"] == ones and halves == [goes_back] * len(ones) and counts["I"] == counts["W"]:
        return
    for key in range(parts * stages):
        f, b, i, w = (counts[kind][key] for kind in KINDS)
        if f == 1 and (b, i, w) in (((1, 0, 0), (0, 1, 1)) if goes_back else ((0, 0, 0),)):
            continue
        stage, microbatch = divmod(key, parts)
        pipe = schedule.pipe_of[microbatch]
        rank = f"rank {schedule.placement[pipe][stage]}: " if pipe >= 0 else ""
        named = {kind: Action(kind, max(pipe, 0), stage, (microbatch,)) for kind in KINDS}
        faults = [
            f"{named[kind]} {counted(counts[kind][key], 'time')}"
            for kind in KINDS
            if counts[kind][key] > 1
        ]
        if not f:
            faults.append(f"no {named['F']}")
        if goes_back and not b + i:
            faults.append(f"no {named['B']}")
        if b and i + w:
            faults.append(f"{named['B']} beside its I or W")
        if not b and i != w:
            faults.append(f"{i} I but {w} W of micro-batch {microbatch} on stage {stage}")
        yield rank + ", ".join(faults)


def _idle(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        if not any(action.kind in KINDS for action in order):
            yield f"rank {rank} runs nothing"


def _backward_follows(schedule: Schedule) -> Iterator[str]:
    parts = schedule.all_parts
    for rank, order in enumerate(schedule.orders):
        done: set[int] = set()
        for action in order:
            keys = [action.stage * parts + microbatch for microbatch in action.microbatches]
            if action.kind == "F":
                done.update(keys)
            elif action.kind in ("B", "I") and not done.issuperset(keys):
                late = next(m for m, key in zip(action.microbatches, keys) if key not in done)
                forward = Action("F", action.pipe, action.stage, (late,))
                yield f"rank {rank}: {action} comes before {forward}"


def _sliced(schedule: Schedule) -> Iterator[str]:
    """Find slices that come before those that they need: attention reads the keys of earlier ones,
    whose gradients come from later ones."""
    if len(schedule.slices) < 2:
        return
    last = len(schedule.slices) - 1
    for rank, order in enumerate(schedule.orders):
        done: dict[tuple[str, int, int], int] = {}  # by direction, stage and micro-batch: slices
        for action in order:
            direction = "F" if action.kind == "F" else "B" if action.kind in "BI" else ""
            for number in action.microbatches if direction else ():
                microbatch, at = schedule.slice_of(number)
                key = direction, action.stage, microbatch
                expected = done.get(key, 0) if direction == "F" else last - done.get(key, 0)
                done[key] = done.get(key, 0) + 1
                if at != expected:
                    yield f"rank {rank}: {action} is slice {at}, slice {expected} comes next"


def _weight_follows(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        done: set[tuple[int, tuple[int, ...]]] = set()
        for action in order:
            if action.kind == "I":
                done.add((action.stage, action.microbatches))
            elif action.kind == "W" and (action.stage, action.microbatches) not in done:
                half = Action("I", action.pipe, action.stage, action.microbatches)
                yield f"rank {rank}: {action} is not preceded by {half}"


def _sums(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        summed: set[int] = set()
        for at, action in enumerate(order):
            if action.kind != SUM:
                continue
            computing = schedule.gradient_positions[rank].get(action.stage, ())
            if computing and computing[-1] > at:
                yield f"rank {rank}: {action} comes before {order[computing[-1]]}"
            if action.stage in summed:
                yield f"rank {rank}: {action} stands there twice"
            summed.add(action.stage)


def _matched(schedule: Schedule) -> Iterator[str]:
    """Find micro-batches that are joined on one stage and not on another of the pipe."""
    groups: dict[tuple[bool, int], tuple[Action, int]] = {}
    for rank, action in schedule.actions:
        if action.kind not in ("F", "B", "I"):
            continue
        forward = action.kind == "F"
        for microbatch in action.microbatches:
            other, first = groups.setdefault((forward, microbatch), (action, rank))
            if other.microbatches != action.microbatches:
                yield f"{other} on rank {first}, {action} on rank {rank}"
                break


def _overlaps(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        for action, after in zip(order, [*order[1:], None]):
            if not action.overlaps:
                continue
            if after is None:
                yield f"rank {rank}: {action} is the last"
            elif action.kind != "F" or after.kind not in ("B", "I") or after.overlaps:
                yield f"rank {rank}: {action} with {after}"
            elif (action.stage, action.microbatches) == (after.stage, after.microbatches):
                yield f"rank {rank}: {action} with {after}, its own backward"


def _deadlock(schedule: Schedule) -> Iterator[str]:
    steps = [0.0] * schedule.stages
    result = time_actions(schedule, dict.fromkeys(KINDS, steps), 0.0)
    for rank, key in sorted(result.waiting.items()):
        rows = enumerate(schedule.messages[rank])
        position = next(i for i, (awaited, _, _) in rows if awaited == key)
        sender, other = schedule.senders[key]
        yield (
            f"rank {rank}: {schedule.orders[rank][position]} waits for "
            f"{schedule.orders[sender][other]} of rank {sender}"
        )
