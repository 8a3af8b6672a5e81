"""The memory law on processes: what is held at most in a step is what the plan says."""

from __future__ import annotations

from tests.distributed import memory
from tests.distributed.forked import launch_forked

CLOSE = 0.05
ALONE = 1e-3


def test_the_peak_of_a_step_is_the_plan_s() -> None:
    first, second = launch_forked(memory.cases, memory.run, 2)
    assert first == second
    assert len(first) == len(memory.WAYS)
    far = [(how, ratio) for how, ratio in first if abs(ratio - 1) > CLOSE]
    assert not far


def test_alone_it_is_so_to_a_thousandth() -> None:
    """Of a tied parameter two gradients and their sum are there at a time; of what a call reads
    that runs again, all that it is made of."""
    (found,) = launch_forked(memory.cases, memory.alone, 1)
    assert len(found) == len(memory.ALONE)
    assert not [(how, ratio) for how, ratio in found if abs(ratio - 1) > ALONE]
