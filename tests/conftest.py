"""What all tests share."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests import sampling
from tests.cpu_seconds import CpuSeconds, law_of, recorded
from tests.unhurried import weigh_all

weigh_all()
torch.set_num_threads(1)  # tiny tensors: threads only cost
gc.set_threshold(20_000, 50, 100)  # of the many small objects of graphs few are in cycles
# What starts processes begins: their time is not that of the test's own.
STARTS_PROCESSES = "distributed/", "test_examples", "test_cli.py", "test_executor_processes"


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)
    parser.addoption("--record-cpu", action="store_true", help="write the CPU seconds of laws")


def pytest_configure(config: pytest.Config) -> None:
    sampling.fix_seed(config)
    options = {"records": "record_cpu", "is_full": "full"}
    chosen = {name: config.getoption(option) for name, option in options.items()}
    config.pluginmanager.register(CpuSeconds(**chosen))


def pytest_report_header() -> str:
    return sampling.header()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the cases of sampled laws, and bring the longest files to the front."""
    chosen = dict.fromkeys(sampling.sample(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    known, seconds = recorded(), Counter[Path]()
    for item in items:
        if (law := known.get(law_of(item.nodeid))) is not None:
            seconds[item.path] += law.mean  # type: ignore[assignment]

    def rank(item: pytest.Item) -> tuple[bool, float, str]:
        is_first = any(part in item.path.as_posix() for part in STARTS_PROCESSES)
        return not is_first, -seconds[item.path], item.path.as_posix()

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What was imported stays: collections need not look at it again, test by test, and who asks
    how much that is, as each plan does, need not count it anew."""
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen


def pytest_make_parametrize_id(config, val, argname):
    """Functions are named: their addresses would differ between the processes of one run."""
    return getattr(val, "__name__", None) if callable(val) else None


@pytest.fixture(scope="session")
def warm_ranks() -> None:
    """Ranks are forked from a process that knows what they need (`tests/warm.py`), where none has
    started before."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    forkserver.ensure_running()
