"""Long laws are tested by sampling: each day other cases of each kind.

`make test` takes `SECONDS` of the CPU. Each law has the same part of them, as large as they allow:
a law that takes less runs whole, and of a longer one as many cases run as fit. The cases, in their
order, are divided into that many runs of equal length, and one of each run is drawn, so that no
kind of case is left out. A long case alone runs on some days only, but of each file a case runs.
How long laws take stands in `cpu_seconds.txt`; the seed is the date, it is printed, and
`--sample-seed` repeats it. `make test-full` runs everything.

    @pytest.mark.sampled(3)        # of this law 3 cases run each day, whatever they take
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from random import Random
from typing import TypeVar

import pytest

from tests.cpu_seconds import Law, law_of, recorded

Case = TypeVar("Case")

SEED = "AUTOPAR_SAMPLE_SEED"  # in the environment, so that all workers of one run draw alike
SECONDS = 600.0  # of the CPU, for all laws that are recorded
LONG = 10.0  # CPU seconds of a case: none of such a law runs on some days


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
    laws, files = defaultdict[str, list[pytest.Item]](list), defaultdict[str, list[str]](list)
    for item in items:
        laws[law_of(item.nodeid)].append(item)
    chosen = set[pytest.Item]()
    for name, cases in laws.items():
        for item in cases:
            item.user_properties.append(("cases", len(cases)))
        marker = cases[0].get_closest_marker("sampled")
        count = marker.args[0] if marker else _count(name, len(cases))
        chosen.update(some(cases, count, name))
        files[name.partition("::")[0]].append(name)
    for names in files.values():
        if chosen.isdisjoint(item for name in names for item in laws[name]):
            shortest = min(names, key=lambda name: recorded()[name].mean)
            chosen.update(some(laws[shortest], 1, shortest))
    return [item for item in items if item in chosen]


def some(cases: Sequence[Case], count: int, name: str) -> list[Case]:
    """Return today's `count` of the cases of a law, one of each run; all of them in a full run."""
    if count >= len(cases) or SEED not in os.environ:
        return list(cases)
    random = Random(f"{os.environ[SEED]} {name}")
    bounds = [len(cases) * run // count for run in range(count + 1)] if count else [0]
    return [cases[random.randrange(start, end)] for start, end in pairwise(bounds)]


def _count(name: str, cases: int) -> int:
    """Return how many cases of a law run today."""
    if SEED not in os.environ or (law := recorded().get(name)) is None:
        return cases
    most = largest_part()
    if law.mean * cases <= most:
        return cases
    count = int(most / law.mean + Random(f"{os.environ[SEED]} days of {name}").random())
    return max(count, 1) if cases > 1 and law.mean < LONG else count


@cache
def largest_part() -> float:
    """Return the seconds that each law has, so that all together take what there is."""
    laws = recorded().values()
    return largest(SECONDS, lambda part: seconds_of(laws, part), max(law.total for law in laws))


def largest(limit: float, of: Callable[[float], float], most: float) -> float:
    """Return the largest number up to `most` for which a growing function keeps to a limit."""
    least = 0.0
    for _ in range(40):
        middle = (least + most) / 2
        least, most = (middle, most) if of(middle) <= limit else (least, middle)
    return least


def seconds_of(laws: Iterable[Law], part: float) -> float:
    """Return what all laws take on average if each has this part."""
    return sum(
        min(law.total, max(part, law.mean) if law.cases > 1 and law.mean < LONG else part)
        for law in laws
    )
