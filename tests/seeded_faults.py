"""Seeded faults: slips that a person makes in an edit, and the tests that catch each of them.

    python -m tests.seeded_faults                # every fault, beside the tests that catch it
    python -m tests.seeded_faults price-ring     # one of them
    python -m tests.seeded_faults --all          # the whole sample of `make test` for each
    python -m tests.seeded_faults --unchanged    # the same tests without a fault, which all pass

Each fault goes into a copy of the project. Tests run there as `make test` samples them today, up to
the first one that fails. The faults are in `tests/faults.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
SEED = "AUTOPAR_SAMPLE_SEED"  # as in sampling.py, which needs pytest
MISSES = 4  # of all faults, which some day's sample may leave out
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True)
class TestRun:
    """One run of pytest: its exit code, the first test that failed, and seconds of wall time."""

    code: int
    failed: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """Return whether a test ran and failed: no other exit code of pytest says so."""
        return self.code == 1


def main(words: Sequence[str] | None = None) -> int:
    """Apply faults one by one, print which test catches each, and return the exit code."""
    arguments = _parser().parse_args(words)
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    if unknown := {*arguments.names} - {fault.name for fault in faults}:
        print(f"no fault is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    allowed = 0 if arguments.names else MISSES
    caught = 0
    with TemporaryDirectory(prefix="autopar-faults-") as folder:
        copy = Path(folder) / "autopar"
        copy_project(copy)
        for fault in faults:
            tests = () if arguments.all else fault.tests
            if arguments.unchanged:
                run = run_tests(copy, tests)
            else:
                with applied(fault, copy):
                    run = run_tests(copy, tests)
            caught += run.is_caught
            print(_line(fault, run, is_unchanged=arguments.unchanged), flush=True)
    if arguments.unchanged:
        print(f"{caught} of {len(faults)} fail without a fault")
        return int(caught > 0)
    print(f"{caught} of {len(faults)} caught")
    return int(len(faults) - caught > allowed)


def copy_project(copy: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)


@contextmanager
def applied(fault: Fault, copy: Path) -> Iterator[None]:
    """Write a fault into a copy of the project, and take it back at the end."""
    path = copy / fault.file
    sound = path.read_text()
    path.write_text(fault.apply(sound))
    try:
        yield
    finally:
        path.write_text(sound)
        # Python goes by seconds and size, which both texts may share.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: Sequence[str]) -> TestRun:
    """Run tests of a copy up to the first failure, or all of `make test` where none is named."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    environment = {**os.environ, "PYTHONPATH": str(copy), SEED: os.environ.get(SEED, today)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", *tests]
    start = time.monotonic()
    process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = _FAILED.search(process.stdout)
    seconds = time.monotonic() - start
    return TestRun(process.returncode, failed[1] if failed else "", seconds)


def _line(fault: Fault, run: TestRun, *, is_unchanged: bool) -> str:
    """Return the line that is printed for one fault."""
    verdict = "caught" if run.is_caught else "MISSED"
    if is_unchanged:
        verdict = "passes" if run.code == 0 else "fails"
    # 5: no test ran, as the sample of the day has none of them.
    reason = run.failed or ("" if run.code == 0 else f"pytest ended with exit code {run.code}")
    return f"{fault.name:<24} {verdict}  {run.seconds:5.1f} s  {reason}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="run all that `make test` runs")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without a fault")
    return parser


if __name__ == "__main__":
    sys.exit(main())
