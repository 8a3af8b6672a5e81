"""The memory law on processes: what is held at most in a step is what the plan says."""

from __future__ import annotations

from functools import partial

import pytest

from tests.distributed import memory
from tests.distributed.forked import launch_forked
from tests.sampling import some

CLOSE = 0.05
ALONE = 1e-3


@pytest.mark.sampled(1)
def test_the_peak_of_a_step_is_the_plan_s() -> None:
    ways = some(memory.WAYS, 5, "peaks")
    first, second = launch_forked(partial(memory.cases, ways), memory.run, 2, ways)
    assert first == second
    assert len(first) == len(ways)
    far = [(how, ratio) for how, ratio in first if abs(ratio - 1) > CLOSE]
    assert not far


def test_alone_it_is_so_to_a_thousandth() -> None:
    """Of a tied parameter two gradients and their sum are there at a time; of what a call reads
    that runs again, all that it is made of."""
    ways = some(memory.ALONE, 2, "alone")
    (found,) = launch_forked(partial(memory.cases, ways), memory.alone, 1, ways)
    assert len(found) == len(ways)
    assert not [(how, ratio) for how, ratio in found if abs(ratio - 1) > ALONE]
