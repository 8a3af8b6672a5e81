"""Token slices: the dynamic programme against all ways to cut, and the worked numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

import autopar as ap
from autopar.errors import InvalidInput
from autopar.pipeline import token_slices


def table(units: int, time: Callable[[int, int], float]) -> list[list[float]]:
    return [[time(size, c) for size in range(1, units - c + 1)] for c in range(units)]


def cuts(units: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a sequence."""
    if not units:
        yield ()
    for first in range(1, units + 1):
        for rest in cuts(units - first):
            yield (first, *rest)


def seconds(lengths: Sequence[int], times: list[list[float]], stages: int) -> float:
    taken, before = list[float](), 0
    for length in lengths:
        taken.append(times[before][length - 1])
        before += length
    return sum(taken) + (stages - 1) * max(taken)


@pytest.mark.parametrize("stages", [1, 2, 4, 9])
def test_no_other_cut_is_faster(stages: int):
    draw = random.Random(stages)
    for units in range(1, 10):
        for _ in range(5):
            times = table(units, lambda size, before: draw.choice([1, 2, 3.5]) * draw.random())
            found = token_slices(times, stages)
            assert sum(found.lengths) == units
            best = min(seconds(lengths, times, stages) for lengths in cuts(units))
            assert found.seconds == pytest.approx(best, rel=1e-12)
            assert seconds(found.lengths, times, stages) == pytest.approx(best, rel=1e-12)


def test_without_attention_more_slices_are_never_worse():
    """t(l; c) = l: equal slices are best up to the unit, (M + K - 1) t with M = L."""
    for units, stages in ((8, 4), (12, 3), (30, 8)):
        found = token_slices(table(units, lambda size, before: float(size)), stages)
        assert found.lengths == (1,) * units
        assert found.seconds == units + stages - 1
    alone = token_slices(table(1, lambda size, before: 12.0), 4)
    assert alone.seconds == 4 * 12  # one slice alone takes K times its time


@pytest.mark.parametrize(
    ("units", "stages", "overhead"), [(64, 5, 4.0), (64, 2, 4.0), (96, 7, 9.0)]
)
def test_an_overhead_of_each_slice_decides_their_number(units: int, stages: int, overhead: float):
    """T = L + M o + (K - 1)(L / M + o), which is least at M = sqrt((K - 1) L / o)."""
    found = token_slices(table(units, lambda size, before: size + overhead), stages)
    number = math.sqrt((stages - 1) * units / overhead)
    assert len(found.lengths) == pytest.approx(number, abs=1)
    assert max(found.lengths) - min(found.lengths) <= max(1, units % len(found.lengths))
    least = units + number * overhead + (stages - 1) * (units / number + overhead)
    assert least * (1 - 1e-12) <= found.seconds <= 1.02 * least


def test_attention_makes_later_slices_shorter():
    """Each token reads all before it, so that a later one takes longer."""
    found = token_slices(table(48, lambda size, before: 4 + size * (1 + before / 16)), 8)
    assert len(found.lengths) > 4
    assert found.lengths[0] > 2 * found.lengths[-1]
    half = len(found.lengths) // 2
    assert sum(found.lengths[:half]) > sum(found.lengths[half:])


def test_a_long_sequence_takes_little_time():
    found = token_slices(
        table(256, lambda size, before: 20 + size * (1 + (before + size) / 64)), 16
    )
    assert sum(found.lengths) == 256


@pytest.mark.parametrize(
    ("times", "stages", "message"),
    [
        ([], 2, "rows of nothing"),
        ([[1.0, 2.0], [1.0, 2.0]], 2, "rows of 2, 2"),
        ([[1.0, -2.0], [1.0]], 2, "not negative"),
        ([[math.nan]], 2, "finite"),
        ([[1.0]], 0, "stages=0"),
    ],
)
def test_what_is_refused(times: list[list[float]], stages: int, message: str):
    with pytest.raises(InvalidInput) as error:
        ap.pipeline.token_slices(times, stages)
    assert message in str(error.value)
