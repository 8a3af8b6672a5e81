"""Counts of what ranks hold in a step follow from the schedule, and bytes from both."""

from __future__ import annotations

import numpy as np
import pytest

import autopar as ap
from autopar.pipeline.activation_counts import live_microbatches
from autopar.pipeline.schedule import one_stage
from autopar.pipeline.step_memory import Part, StageMemory, most_in_step, stages_of, step_counts

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_and_halves_are_those_of_the_order(name: str) -> None:
    made = ap.pipeline.schedule(name, stages=4, microbatches=8)
    for rank, counts in enumerate(step_counts(made)):
        assert (counts >= 0).all()
        for number, stage in enumerate(stages_of(made, rank)):
            live = [moment[stage] for moment in live_microbatches(made, rank)]
            assert counts[:, number, Part.KEPT].max() == max(whole for whole, *_ in live)
            assert counts[:, number, Part.HALVES].max() == max(later for _, _, later, *_ in live)
            ends = stage == 0, stage == made.stages - 1
            for part, is_none in zip((Part.RECEIVED, Part.RETURNED), ends):
                assert (counts[:, number, part].max() == 0) == is_none


def test_buffers_of_messages_go_when_the_schedule_says_that_they_have_arrived() -> None:
    made = ap.pipeline.schedule("1f1b", stages=2, microbatches=4)
    first, last = (counts[:, 0] for counts in step_counts(made))
    # Of the two that are under way, the gradient of the first says that it was read.
    assert first[:, Part.SENT].max() == 2
    assert last[:, Part.GIVEN].max() >= 1
    assert last[:, Part.RECEIVED].max() == 2  # one in work, the next one on its way


def stage(gradients: dict[str, float], **sizes: float) -> StageMemory:
    found = np.zeros(len(Part))
    for name, size in sizes.items():
        found[Part[name]] = size
    return StageMemory(found, gradients, frozenset(), 0.0)


def test_later_micro_batches_find_the_gradients_of_those_before() -> None:
    only = stage({"w": 5.0}, KEPT=10, F=12, B=14, B_AGAIN=13, B_LAST=11, B_ONLY=15, LATE=5)
    assert most_in_step(one_stage(1), 0, {0: only}) == 15
    assert most_in_step(one_stage(2), 0, {0: only}) == 12 + 5
    assert most_in_step(one_stage(3), 0, {0: only}) == 13 + 5


def test_a_parameter_of_two_stages_has_one_gradient() -> None:
    made = ap.pipeline.schedule("interleaved", stages=2, microbatches=2, chunks=2)
    apart = {n: stage({f"w{n}": 5.0}, LATE=5) for n in range(4)}
    tied = {n: stage({"w": 5.0}, LATE=5) for n in range(4)}
    assert most_in_step(made, 0, apart) == 10
    assert most_in_step(made, 0, tied) == 5
