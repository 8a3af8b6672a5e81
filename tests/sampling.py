"""Laws with many cases are tested by sampling: each day other cases of each kind.

    @pytest.mark.sampled(20)
    @pytest.mark.parametrize("rule", RULES)          # 1,575 of them, kind by kind
    def test_rule_law(rule): ...

`make test` runs 20 of them: the cases, in their order, are divided into 20 runs of equal length, of
which one case each is drawn, so that no kind of case is left out. The seed is the date; it is
printed, and `--sample-seed` repeats it. `make test-full` runs all cases. Of a file that is marked
`sampled(5, of="file")`, 5 tests run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from random import Random
from typing import TypeVar

import pytest

Case = TypeVar("Case")

SEED = "AUTOPAR_SAMPLE_SEED"  # in the environment, so that all workers of one run draw alike


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of sampled laws")
    parser.addoption("--sample-seed", help="the seed of an earlier run, as it was printed")


def fix_seed(config: pytest.Config) -> None:
    """Settle the seed before workers start; none with `--full`, or where single tests are named."""
    is_named = bool(config.option.keyword) or any("::" in path for path in config.args)
    if is_named or config.getoption("--full"):
        os.environ.pop(SEED, None)
    else:
        seed = config.getoption("--sample-seed") or os.environ.get(SEED)
        os.environ[SEED] = seed or f"{datetime.now(UTC):%Y-%m-%d}"


def header() -> str:
    if (seed := os.environ.get(SEED)) is None:
        return "every case of sampled laws"
    return f"sampled laws: --sample-seed {seed} repeats these cases, --full runs all"


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of today's sample, in their order."""
    chosen = list[pytest.Item]()
    for name, group in groupby(items, _law_of):
        cases = list(group)
        marker = cases[0].get_closest_marker("sampled")
        chosen += cases if marker is None else some(cases, marker.args[0], name)
    return chosen


def some(cases: Sequence[Case], count: int, name: str) -> list[Case]:
    """Return today's `count` of the cases of a law, one of each run; all of them in a full run."""
    if count >= len(cases) or SEED not in os.environ:
        return list(cases)
    random = Random(f"{os.environ[SEED]} {name}")
    bounds = [len(cases) * run // count for run in range(count + 1)] if count else [0]
    return [cases[random.randrange(start, end)] for start, end in pairwise(bounds)]


def _law_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("sampled")
    is_file = marker is not None and marker.kwargs.get("of") == "file"
    return item.path.as_posix() if is_file else item.nodeid.partition("[")[0]
