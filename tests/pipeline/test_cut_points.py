"""What ranks keep at most, and where stages may start, is what their definitions say."""

from __future__ import annotations

import random

import pytest

from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.schedules import weighed_schedules
from autopar.pipeline.stages.stage_tables import _nearest_below
from tests.pipeline.live_counts import live_microbatches


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_a_peak_is_no_more_than_another_in_no_count(
    stages: int, microbatches: int, recompute: bool
) -> None:
    for made in weighed_schedules(stages, microbatches, blocks=12):
        every = []
        for rank in range(made.ranks):
            seen = {
                tuple(live.items()) for live in live_microbatches(made, rank, recompute=recompute)
            }
            counts = {one: [count for _, some in one for count in some] for one in seen}
            every += [
                dict(one)
                for one in sorted(seen)
                if not any(
                    one != other and all(a <= b for a, b in zip(counts[one], counts[other]))
                    for other in seen
                )
            ]
        assert peak_counts(made, recompute=recompute) == every


def test_the_nearest_that_is_below_is_found() -> None:
    draw = random.Random(0)
    for _ in range(50):
        values = [draw.randrange(5) for _ in range(draw.randrange(1, 30))]
        for row in (range(1, len(values)), range(1, len(values))[::-1]):
            expected = {}
            for at, place in enumerate(row):
                below = [other for other in row[:at] if values[other] < values[place]]
                expected |= {place: below[-1]} if below else {}
            assert _nearest_below(values, row) == expected
