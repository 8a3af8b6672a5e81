"""CPU seconds of tests: measured in each run, told at its end by file, kept for sampling by law.

    12.31 tests/test_auto.py::test_plans_under_a_limit     # one case, on average

`pytest --full --record-cpu` writes `cpu_seconds.txt`. Ranks that are forked from a server are not
counted, processes that a test starts itself are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("cpu_seconds.txt")
LEAST = 0.5  # seconds that all cases of a law take, below which it is not recorded


def law_of(name: str) -> str:
    """Return the function of a test, without its parameters."""
    return name.partition("[")[0]


def recorded() -> dict[str, float]:
    """Return the seconds that a case of each long law took when they were recorded last."""
    lines = (line.split() for line in RECORD.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


class CpuSeconds:
    """A plugin of pytest that adds up the CPU seconds of tests, also over several workers."""

    def __init__(self, *, records: bool) -> None:
        self.records = records
        self.started = 0.0
        self.seconds = defaultdict[str, list[float]](list)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.started = _now()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        outcome = yield
        if call.when == "teardown":
            report = outcome.get_result()  # type: ignore[attr-defined]
            report.user_properties.append(("cpu", _now() - self.started))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties if report.when == "teardown" else ():
            if name == "cpu":
                self.seconds[report.nodeid].append(float(seconds))  # type: ignore[arg-type]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files, laws = defaultdict[str, float](float), defaultdict[str, list[float]](list)
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]] += sum(seconds)
            laws[law_of(name)] += seconds
        total = sum(files.values())
        if self.records:
            means = {name: sum(all_of) / len(all_of) for name, all_of in laws.items()}
            long = [name for name in sorted(laws) if sum(laws[name]) >= LEAST]
            RECORD.write_text("".join(f"{means[name]:.2f} {name}\n" for name in long))
        if len(files) > 1:
            longest = sorted(files, key=files.__getitem__, reverse=True)[:10]
            terminalreporter.write_line(f"{total:.0f} CPU s; the ten slowest files:")
            for name in longest:
                terminalreporter.write_line(f"{files[name]:7.1f} {name}")


def _now() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
