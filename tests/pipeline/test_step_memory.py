"""Counts of what ranks hold in a step follow from the schedule, and bytes from both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import autopar as ap
from autopar.passes.gathers import NO_GROUP
from autopar.pipeline.memory.memory_items import KINDS, MemoryItem
from autopar.pipeline.memory.step_memory import StageMemory, peak_in_step, step_counts
from autopar.pipeline.schedule import Schedule, one_stage
from autopar.runtime.parameters.gathered_copies import GatheredGroup, GatherWindow
from tests.pipeline.live_counts import live_microbatches

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_and_halves_are_those_of_the_order(name: str) -> None:
    made = ap.pipeline.schedule(name, stages=4, microbatches=8)
    for rank, counts in enumerate(step_counts(made)):
        assert (counts >= 0).all()
        for number, stage in enumerate(made.stages_on(rank)):
            live = [moment[stage] for moment in live_microbatches(made, rank)]
            assert counts[:, number, MemoryItem.KEPT].max() == max(whole for whole, *_ in live)
            assert counts[:, number, MemoryItem.HALVES].max() == max(
                later for _, _, later, *_ in live
            )
            ends = stage == 0, stage == made.stages - 1
            for part, is_none in zip((MemoryItem.RECEIVED, MemoryItem.RETURNED), ends):
                assert (counts[:, number, part].max() == 0) == is_none


def test_buffers_of_messages_go_when_the_schedule_says_that_they_have_arrived() -> None:
    made = ap.pipeline.schedule("1f1b", stages=2, microbatches=4)
    first, last = (counts[:, 0] for counts in step_counts(made))
    # Of the two that are under way, the gradient of the first says that it was read.
    assert first[:, MemoryItem.SENT].max() == 2
    assert last[:, MemoryItem.GIVEN].max() >= 1
    assert last[:, MemoryItem.RECEIVED].max() == 2  # one in work, the next one on its way


def stage(gradients: dict[str, float], **sizes: float) -> StageMemory:
    found = np.zeros((len(MemoryItem), len(KINDS)))
    for name, size in sizes.items():
        found[MemoryItem[name], 0] = size
    return StageMemory(found, gradients, frozenset(), 0.0)


def most(made: Schedule, rank: int, stages: dict[int, StageMemory]) -> float:
    return sum(peak_in_step(made, rank, stages).values())


def copies(made: Schedule, counts: tuple[int, ...]) -> dict[int, list[GatheredGroup]]:
    """Of stages that read so many groups of copies in turn, of which no two are of one size."""
    found: dict[int, list[GatheredGroup]] = {}
    for index in range(made.stages):
        first = sum(map(len, found.values()))
        sizes = [100 + 7 * (first + at) ** 2 % 91 for at in range(counts[index % len(counts)])]
        found[index] = [
            GatheredGroup(first + at, [], None, [], [torch.zeros(size)], [torch.zeros(size)], False)
            for at, size in enumerate(sizes)
        ]
    return found


def seen_in_window(made: Schedule, rank: int, by_stage: dict[int, list[GatheredGroup]]) -> int:
    """The most bytes of copies that are here while a rank's forwards and backwards run."""
    own = {stage: by_stage[stage] for stage in made.stages_on(rank)}
    window, most = GatherWindow([group for groups in by_stage.values() for group in groups]), 0
    for action in made.orders[rank]:
        numbers = [group.number for group in own[action.stage]]
        ordered = numbers if action.kind == "F" else numbers[::-1]
        turns = list(zip(ordered, [*ordered[1:], NO_GROUP]))
        for _ in action.microbatches if action.kind != "W" else ():
            for number, following in turns:
                if action.kind == "F":
                    window.request(number, following)
                    window.release(number)
                else:
                    beside = None if following == NO_GROUP else window.groups[following]
                    window._request_in_backward((window.groups[number],), beside, None)
                most = max(most, window._bytes)
    window.reset()
    return most


@pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 0, 3), (3,)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_stay_as_long_as_the_runtime_lets_them(name: str, counts: tuple[int, ...]) -> None:
    made = ap.pipeline.schedule(name, stages=4, microbatches=8)
    by_stage, stages = copies(made, counts), {}
    for index, groups in by_stage.items():
        sizes = [float(group.bytes) for group in groups]
        after = (*range(len(sizes))[-2:],), (*range(len(sizes))[:2][::-1],)
        left = list(dict.fromkeys((*after[0], *after[1])))
        names = ["LEFT", "LEFT_1", "LEFT_2", "LEFT_3"]
        parts = {name: sizes[group] for name, group in zip(names, left)}
        together = max(map(sum, pairwise(sizes)), default=sum(sizes))
        running = [part.name for part in MemoryItem if part.name.endswith("_READING")]
        given = parts | dict.fromkeys(running, together)
        forward, backward = (tuple(map(left.index, groups)) for groups in after)
        stages[index] = replace(stage({}, **given), groups=(forward, backward))
    for rank in range(made.ranks):
        assert most(made, rank, stages) == seen_in_window(made, rank, by_stage)


def test_later_micro_batches_find_the_gradients_of_those_before() -> None:
    only = stage({"w": 5.0}, KEPT=10, F=12, B=14, B_AGAIN=13, B_LAST=11, B_ONLY=15, LATE=5)
    assert most(one_stage(1), 0, {0: only}) == 15
    assert most(one_stage(2), 0, {0: only}) == 12 + 5
    assert most(one_stage(3), 0, {0: only}) == 13 + 5


def test_a_parameter_of_two_stages_has_one_gradient() -> None:
    made = ap.pipeline.schedule("interleaved", stages=2, microbatches=2, chunks=2)
    apart = {n: stage({f"w{n}": 5.0}, LATE=5) for n in range(4)}
    tied = {n: stage({"w": 5.0}, LATE=5) for n in range(4)}
    assert most(made, 0, apart) == 10
    assert most(made, 0, tied) == 5
