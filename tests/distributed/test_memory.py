"""The memory law on processes: what is held at most in a step is what the plan says."""

from __future__ import annotations

from tests.distributed import memory
from tests.distributed.forked import launch_forked

CLOSE = 0.05


def test_the_peak_of_a_step_is_the_plan_s() -> None:
    first, second = launch_forked(memory.cases, memory.run, 2)
    assert first == second
    assert len(first) == len(memory.WAYS)
    far = [(how, ratio) for how, ratio in first if abs(ratio - 1) > CLOSE]
    assert not far
