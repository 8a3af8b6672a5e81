"""Long laws are tested by sampling: each day other cases of each kind.

`make test` gives each law about one CPU second. Of a law that takes longer, as many cases run as
fit: the cases, in their order, are divided into that many runs of equal length, and one of each run
is drawn, so that no kind of case is left out. A long case alone runs on some days only.
The seconds are those of `cpu_seconds.txt`; the seed is the date, it is printed, and `--sample-seed`
repeats it. `make test-full` runs everything.

    @pytest.mark.sampled(3)        # of this law 3 cases run: they start processes, whose time
                                   # is not that of the test
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from random import Random
from typing import TypeVar

import pytest

from tests.cpu_seconds import law_of, recorded

Case = TypeVar("Case")

SEED = "AUTOPAR_SAMPLE_SEED"  # in the environment, so that all workers of one run draw alike
BUDGET = 1.0  # CPU seconds of a law
LONG = 10.0  # of a case: none of such a law runs on some days


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of sampled laws")
    parser.addoption("--sample-seed", help="the seed of an earlier run, as it was printed")


def fix_seed(config: pytest.Config) -> None:
    """Settle the seed before workers start; none with `--full`, or where tests are named."""
    is_named = config.option.keyword or config.args_source.name == "ARGS"
    seed = config.getoption("--sample-seed") or os.environ.get(SEED)
    if config.getoption("--full") or (is_named and not seed):
        os.environ.pop(SEED, None)
    else:
        os.environ[SEED] = seed or f"{datetime.now(UTC):%Y-%m-%d}"


def header() -> str:
    if (seed := os.environ.get(SEED)) is None:
        return "every case of every law"
    return f"a sample of long laws: --sample-seed {seed} repeats these cases, --full runs all"


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of today's sample, in their order."""
    laws, seconds = defaultdict[str, list[pytest.Item]](list), recorded()
    for item in items:
        laws[law_of(item.nodeid)].append(item)
    chosen = set[pytest.Item]()
    for name, cases in laws.items():
        marker = cases[0].get_closest_marker("sampled")
        count = marker.args[0] if marker else _count(name, len(cases), seconds.get(name, 0.0))
        chosen.update(some(cases, count, name))
    return [item for item in items if item in chosen]


def some(cases: Sequence[Case], count: int, name: str) -> list[Case]:
    """Return today's `count` of the cases of a law, one of each run; all of them in a full run."""
    if count >= len(cases) or SEED not in os.environ:
        return list(cases)
    random = Random(f"{os.environ[SEED]} {name}")
    bounds = [len(cases) * run // count for run in range(count + 1)] if count else [0]
    return [cases[random.randrange(start, end)] for start, end in pairwise(bounds)]


def _count(name: str, cases: int, seconds: float) -> int:
    """Return how many cases of a law run today that takes so many seconds a case."""
    if seconds * cases <= BUDGET or SEED not in os.environ:
        return cases
    count = int(BUDGET / seconds + Random(f"{os.environ[SEED]} days of {name}").random())
    return max(count, 1) if cases > 1 and seconds < LONG else count
