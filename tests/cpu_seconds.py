"""CPU seconds of tests: measured in each run, told at its end by file, kept for sampling by law.

    12.31 4 tests/test_auto.py::test_plans_under_a_limit    # one case on average, and how many

`--record-cpu` writes into `cpu_seconds.txt` what the laws of a run take; with `--full` no others
stay there. Processes that are forked from a server count where the system tells what they took.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("cpu_seconds.txt")
LEAST = 0.5  # seconds that all cases of a law take, below which it is not recorded


@dataclass
class Law:
    """The seconds of those cases of a law that ran, and the number of all."""

    seconds: list[float] = field(default_factory=list)
    cases: int = 0

    @property
    def mean(self) -> float:
        """The seconds of one case."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def total(self) -> float:
        """The seconds of all cases."""
        return self.mean * self.cases


def law_of(name: str) -> str:
    """Return the function of a test, without its parameters."""
    return name.partition("[")[0]


@cache
def recorded() -> dict[str, Law]:
    """Return the long laws as they were recorded last."""
    lines = (line.split() for line in RECORD.read_text().splitlines())
    return {name: Law([float(seconds)], int(cases)) for seconds, cases, name in lines}


def write(laws: dict[str, Law]) -> None:
    """Record the laws that are long."""
    long = {name: law for name, law in sorted(laws.items()) if law.total >= LEAST}
    lines = [f"{law.mean:.2f} {law.cases} {name}\n" for name, law in long.items()]
    RECORD.write_text("".join(lines))


class CpuSeconds:
    """A plugin of pytest that adds up the CPU seconds of tests, also over several workers."""

    def __init__(self, *, records: bool, is_full: bool) -> None:
        self.records, self.is_full = records, is_full
        self.started = 0.0
        self.files = defaultdict[str, float](float)
        self.laws = defaultdict[str, Law](Law)

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
        if report.when == "teardown":
            law, properties = self.laws[law_of(report.nodeid)], dict(report.user_properties)
            law.seconds.append(float(properties["cpu"]))  # type: ignore[arg-type]
            law.cases = int(properties["cases"])  # type: ignore[call-overload]
            self.files[report.nodeid.partition("::")[0]] += law.seconds[-1]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.records:
            write(self.laws if self.is_full else recorded() | self.laws)
        if len(self.files) > 1:
            total = sum(self.files.values())
            terminalreporter.write_line(f"{total:.0f} CPU s; the twenty slowest files:")
            for name in sorted(self.files, key=self.files.__getitem__, reverse=True)[:20]:
                terminalreporter.write_line(f"{self.files[name]:7.1f} {name}")


def _now() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + _of_server()


def _of_server() -> float:
    """Return the seconds of the server that ranks are forked from, and of those that have ended."""
    number = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        words = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # none has started, or the system has no such file
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
