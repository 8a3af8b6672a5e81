"""The sample of a day: what it takes, that no kind of case is left out, that it is drawn again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests import sampling
from tests.cpu_seconds import Law, recorded

LAWS = {
    "short": Law([0.1], 5),
    "many": Law([0.5], 100),
    "long": Law([8.0], 3),
    "alone": Law([40.0], 1),
}


@pytest.mark.parametrize("limit", [9.0, 12.0, 30.0, 1e9])
def test_every_law_has_the_same_part(limit: float) -> None:
    def taken(part: float) -> float:
        return sampling.seconds_of(LAWS.values(), part)

    most = max(law.total for law in LAWS.values())
    part = sampling.largest(limit, taken, most)
    assert taken(part) <= limit
    assert taken(1.01 * part) > limit or part == pytest.approx(most)


def test_what_is_recorded_keeps_to_the_seconds() -> None:
    assert sampling.seconds_of(recorded().values(), sampling.largest_part()) <= sampling.SECONDS


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_one_case_of_each_run_is_drawn_and_drawn_again(count: int, monkeypatch) -> None:
    monkeypatch.setenv(sampling.SEED, "a day")
    cases = list(range(20))
    drawn = sampling.some(cases, count, "law")
    assert drawn == sampling.some(cases, count, "law")
    assert len(drawn) == count
    bounds = [20 * run // count for run in range(count + 1)]
    assert all(low <= case < high for case, (low, high) in zip(drawn, pairwise(bounds)))
    monkeypatch.setenv(sampling.SEED, "another")
    assert sampling.some(cases, 1, "law") != sampling.some(cases, 1, "other law")
    monkeypatch.delenv(sampling.SEED)
    assert sampling.some(cases, count, "law") == cases
