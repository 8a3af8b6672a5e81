"""Laws with many cases are tested by sampling: each day other cases of each kind.

    @pytest.mark.sampled(20)
    @pytest.mark.parametrize("rule", RULES)          # 1,575 of them, kind by kind
    def test_rule_law(rule): ...

`make test` runs 20 of them: the cases, in their order, are divided into 20 runs of equal length, of
which one case each is drawn, so that no kind of case is left out. The seed is the date; it is
printed, and `--sample-seed` repeats it. `make test-full` runs all cases, and alone what is marked
`sampled(0)`.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from itertools import groupby, pairwise
from random import Random

import pytest

SEED = "AUTOPAR_SAMPLE_SEED"  # in the environment, so that all workers of one run draw alike


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of sampled laws")
    parser.addoption("--sample-seed", help="the seed of an earlier run, as it was printed")


def fix_seed(config: pytest.Config) -> None:
    """Settle the seed before workers start."""
    given = config.getoption("--sample-seed")
    os.environ[SEED] = given or os.environ.get(SEED) or f"{datetime.now(UTC):%Y-%m-%d}"


def runs_all(config: pytest.Config) -> bool:
    """Return whether nothing is sampled: by `--full`, or because single tests are named."""
    is_named = bool(config.option.keyword) or any("::" in path for path in config.args)
    return is_named or config.getoption("--full")


def header(config: pytest.Config) -> str:
    if runs_all(config):
        return "every case of sampled laws"
    return f"sampled laws: --sample-seed {os.environ[SEED]} repeats these cases, --full runs all"


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of today's sample, in their order."""
    chosen = list[pytest.Item]()
    for (_, name), group in groupby(items, lambda item: (item.path, _function_of(item))):
        cases = list(group)
        marker = cases[0].get_closest_marker("sampled")
        if marker is None:
            chosen += cases
        else:
            chosen += _one_of_each_run(cases, marker.args[0], name)
    return chosen


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _one_of_each_run(cases: list[pytest.Item], count: int, name: str) -> list[pytest.Item]:
    if count >= len(cases):
        return cases
    random = Random(f"{os.environ[SEED]} {name}")
    bounds = [len(cases) * run // count for run in range(count + 1)] if count else [0]
    return [cases[random.randrange(start, end)] for start, end in pairwise(bounds)]
