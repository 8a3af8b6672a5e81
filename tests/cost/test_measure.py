"""Measuring this machine, for real, with two processes."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster.calibration import (
    _GUESS,
    _run_measurement,
    far_memory_cost,
    fit_links,
    measured_node,
    output_of,
)
from autopar.cluster.measure import BYTES, nested_medians, overlap_share
from autopar.errors import ExecutionError


def test_two_processes_measure_themselves() -> None:
    figures = _run_measurement(2)
    node = measured_node(2, 2, figures)
    assert node.devices == 2
    assert node.device.peak("f32") > 1e8
    assert node.device.bandwidth > 1e7
    assert node.device.overlap == figures["overlap"]
    assert 0 <= node.device.overlap <= 1
    assert node.device.near_bytes >= 0
    assert 0 <= node.device.far_seconds < 1e-7
    kinds = {kind for kind, _ in node.link.measured}
    assert {"all_reduce", "all_gather", "shift"} <= kinds
    assert all(alpha > 0 and rate > 0 for alpha, rate in node.link.measured.values())


def test_cached_bytes_are_where_the_line_through_two_sizes_begins() -> None:
    assert far_memory_cost([(6e6, 2e-3), (10e6, 6e-3)]) == pytest.approx((4e6, 1e-9))
    assert far_memory_cost([(6e6, 5e-3), (10e6, 6e-3)]) == pytest.approx((0.0, 0.25e-9))
    assert far_memory_cost([(6e6, -1e-3), (10e6, 6e-3)]) == far_memory_cost([]) == (0.0, 0.0)


def test_medians_of_several_measurements() -> None:
    found = [{"rates": {"f32": rate}, "links": [["shift", 2, rate]]} for rate in (3.0, 9.0, 1.0)]
    assert nested_medians(found) == {"rates": {"f32": 3.0}, "links": [["shift", 2, 3.0]]}


def test_noise_never_gives_an_endless_bandwidth() -> None:
    timings = [("all_reduce", 2, 1000, 1e-3), ("all_reduce", 2, 1_000_000, 0.9e-3)]
    ((_, bandwidth),) = fit_links(timings).values()
    assert 0 < bandwidth < 1e12


def test_a_message_to_a_neighbour_moves_all_its_bytes() -> None:
    timings = [
        (kind, 4, 1000 * n, 1e-3 * (n + 1)) for kind in ("shift", "all_gather") for n in (1, 9)
    ]
    found = fit_links(timings)
    assert found["shift", 4] == pytest.approx((2e-3, 1e6))
    assert found["all_gather", 4] == pytest.approx((2e-3 / 2, 0.75e6))  # log2(4) messages


def test_a_single_size_fits_no_link() -> None:
    assert fit_links([("all_reduce", 2, 4096, 1e-4)]) == {}


def figures_of(*sizes: int) -> dict[str, Any]:
    """Return a node whose groups of these sizes were measured: shifts of 1 MB take 10 ms more."""
    sums = [("all_reduce", n, size, 1e-3 + size / 1e8) for n in sizes for size in BYTES]
    shifts = [("shift", n, size, 1e-3 + n * size / 2e8) for n in sizes for size in BYTES]
    return {**_GUESS, "collectives": [*sums, *shifts]}


@pytest.mark.parametrize(("devices", "sizes"), [(2, (2,)), (3, (3,)), (6, (2, 3, 6)), (7, (7,))])
def test_a_message_is_a_shift_in_the_smallest_group(devices: int, sizes: tuple[int, ...]) -> None:
    link = measured_node(devices, devices, figures_of(*sizes)).link
    assert (link.alpha, link.bandwidth) == link.measured["shift", min(sizes)]
    assert link.bandwidth == pytest.approx(2e8 / min(sizes))


def test_all_devices_share_their_machine() -> None:
    few, many = (measured_node(n, 8, figures_of(2, 4, 8)) for n in (8, 32))
    for kind in ("all_reduce", "shift"):
        (alpha, bandwidth), (as_long, part) = (one.link.of(kind, 8) for one in (few, many))
        assert (as_long, part) == (alpha, bandwidth / 4)
    assert many.link.bandwidth == few.link.bandwidth / 4
    assert many.device.peak("f32") == few.device.peak("f32") / 4


# It forks one that holds a lock as long as it lives, says so, and waits.
_FORKS = """
import fcntl, os, sys, time
ours, theirs = os.pipe()
if os.fork() == 0:
    held = open(sys.argv[1], "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(theirs, b".")
    time.sleep(600)
os.read(ours, 1)
time.sleep(600)
"""


def test_a_slow_measurement_is_killed_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ExecutionError, match="a process of its own") as caught:
        output_of([sys.executable, "-c", _FORKS, str(path)], seconds=2.0)
    assert "more than 2 seconds" in str(caught.value)
    assert "measure=False" in str(caught.value)
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # else this waits for minutes


def test_a_failed_measurement_says_why() -> None:
    with pytest.raises(ExecutionError, match="a process of its own") as caught:
        output_of([sys.executable, "-c", "raise SystemExit('no cores')"], seconds=60.0)
    assert "it failed: no cores" in str(caught.value)


def test_overlap_is_the_time_that_running_both_saves() -> None:
    assert overlap_share(alone=4.0, moved=2.0, together=4.0) == 1
    assert overlap_share(alone=4.0, moved=2.0, together=4.5) == 0.75
    assert overlap_share(alone=4.0, moved=2.0, together=6.5) == 0  # worse than one after the other
    assert overlap_share(alone=4.0, moved=2.0, together=3.9) == 1  # noise
