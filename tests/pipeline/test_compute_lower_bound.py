"""What a step takes at least under a schedule, however work is spread over its stages."""

from __future__ import annotations

import random

import pytest

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import NAMES, schedule, weighed_schedules
from autopar.pipeline.simulation.compute_lower_bound import _simulated, least_time

SIZES = [(2, 2), (2, 8), (4, 4), (4, 8), (8, 8), (8, 16)]


def made(stages: int, microbatches: int) -> list[Schedule]:
    """All that exist for these numbers."""
    found = list(weighed_schedules(stages, microbatches))
    for name in NAMES:
        try:
            found.append(schedule(name, stages=stages, microbatches=microbatches))
        except InvalidInput:  # it wants other numbers
            continue
    return found


def random_spread(stages: int, generator: random.Random) -> list[float]:
    """Forward, gradients of inputs and of weights, these no more than those: in all 1."""
    parts = [generator.random() ** generator.choice((0.2, 1, 4)) for _ in range(2 * stages)]
    parts += [parts[stages + at] * generator.random() for at in range(stages)]
    return [part / sum(parts) for part in parts]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_no_spread_of_work_takes_less(stages: int, microbatches: int) -> None:
    generator = random.Random(stages * microbatches)
    for one in made(stages, microbatches):
        least = least_time(one)
        assert least_time(one, enough=least * 0.9) <= least * (1 + 1e-9)
        assert least >= one.batch_parts / stages * (1 - 1e-5), one.name
        for _ in range(25):
            taken = _simulated(one, random_spread(one.stages, generator)).makespan
            assert taken >= least * (1 - 1e-9), (one.name, one.options)


def test_of_two_stages_it_is_known() -> None:
    assert least_time(schedule("1f1b", stages=2, microbatches=2)) == pytest.approx(4 / 3, rel=1e-4)
    assert least_time(schedule("chimera", stages=2, microbatches=4)) == pytest.approx(2, rel=1e-4)
