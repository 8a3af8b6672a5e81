"""Bytes of a rank during a step, by kind, action by action or call by call.

The most bytes at one time are those of `peak_in_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.pipeline.memory.memory_items import KINDS, READING, BytesByKind, MemoryItem
from autopar.pipeline.memory.memory_timeline import MemoryTimeline
from autopar.pipeline.memory.moments import MemorySample
from autopar.pipeline.memory.step_memory import (
    Counts,
    StageMemory,
    counts_by_action,
    kinds_of,
    peak_of,
)
from autopar.pipeline.schedule import Action, Schedule, one_stage

# Backward runs after the first one find gradients of parameters; the last ones sum them.
_LATER_RUNS = (MemoryItem.B_AGAIN, MemoryItem.B_LAST)
_LAST_RUNS = (MemoryItem.B_LAST, MemoryItem.B_ONLY)


def peaks_by_action(
    schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]
) -> list[BytesByKind]:
    """Return the peak of each action of a rank; of slices of a sequence, that of the whole."""
    held, whole = [stages[stage] for stage in schedule.stages_on(rank)], schedule.of_sequences
    peaks = [peak_of(counts, held) for counts in counts_by_action(whole, rank, stages)]
    if not schedule.slices:
        return peaks
    places = {
        (action.kind, action.stage, action.microbatches): at
        for at, action in enumerate(whole.orders[rank])
    }

    def place(action: Action) -> int:
        numbers = tuple(schedule.slice_of(number)[0] for number in action.microbatches)
        return places[action.kind, action.stage, numbers]

    return [peaks[place(action)] for action in schedule.orders[rank]]


def bytes_by_call(
    program: StageMemory, timeline: MemoryTimeline, microbatches: int
) -> list[list[tuple[str, BytesByKind]]]:
    """Return the calls with their bytes for each forward and backward of an unstaged program."""
    return [
        [
            (sample.call, kinds)
            for (counts,) in rows
            for sample, kinds in _samples_of_run(program, counts, timeline)
        ]
        for rows in counts_by_action(one_stage(microbatches), 0, {0: program})
    ]


def _samples_of_run(
    program: StageMemory, counts: Counts, timeline: MemoryTimeline
) -> Iterator[tuple[MemorySample, BytesByKind]]:
    """Yield the samples of the running action, with all that the rank holds at each."""
    running = next((item for item in range(MemoryItem.F, len(MemoryItem)) if counts[item]), None)
    if running is None:
        return
    reads = running >= MemoryItem.F_READING
    run = MemoryItem(running - READING * reads)
    constant = counts[: MemoryItem.F] @ program.by_item[: MemoryItem.F]
    held = {kind: float(size) for kind, size in zip(KINDS, constant)}
    for sample in timeline.forward if run == MemoryItem.F else timeline.backward:
        if (sample.copies is not None) == reads:
            kinds = kinds_of(sample, is_later=run in _LATER_RUNS, is_last=run in _LAST_RUNS)
            yield sample, {kind: size + kinds[kind] for kind, size in held.items()}
