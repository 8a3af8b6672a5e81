"""Measuring this machine, for real, with two processes."""

from __future__ import annotations

import pytest

from autopar.cluster.calibration import _measure, far_of, fit, measured_node
from autopar.cluster.measure import middle, overlapped


def test_two_processes_measure_themselves() -> None:
    figures = _measure(2)
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


def test_what_caches_hold_is_where_the_line_through_two_sizes_begins() -> None:
    assert far_of([(6e6, 2e-3), (10e6, 6e-3)]) == pytest.approx((4e6, 1e-9))
    assert far_of([(6e6, 5e-3), (10e6, 6e-3)]) == pytest.approx((0.0, 0.25e-9))
    assert far_of([(6e6, -1e-3), (10e6, 6e-3)]) == far_of([]) == (0.0, 0.0)


def test_of_several_measurements_the_medians_count() -> None:
    found = [{"rates": {"f32": rate}, "links": [["shift", 2, rate]]} for rate in (3.0, 9.0, 1.0)]
    assert middle(found) == {"rates": {"f32": 3.0}, "links": [["shift", 2, 3.0]]}


def test_noise_never_gives_an_endless_bandwidth() -> None:
    timings = [("all_reduce", 2, 1000, 1e-3), ("all_reduce", 2, 1_000_000, 0.9e-3)]
    ((_, bandwidth),) = fit(timings).values()
    assert 0 < bandwidth < 1e12


def test_a_message_to_a_neighbour_moves_all_its_bytes() -> None:
    timings = [
        (kind, 4, 1000 * n, 1e-3 * (n + 1)) for kind in ("shift", "all_gather") for n in (1, 9)
    ]
    found = fit(timings)
    assert found["shift", 4] == pytest.approx((2e-3, 1e6))
    assert found["all_gather", 4] == pytest.approx((2e-3 / 3, 0.75e6))


def test_overlap_is_what_both_together_spare() -> None:
    assert overlapped(alone=4.0, moved=2.0, together=4.0) == 1
    assert overlapped(alone=4.0, moved=2.0, together=4.5) == 0.75
    assert overlapped(alone=4.0, moved=2.0, together=6.5) == 0  # worse than one after the other
    assert overlapped(alone=4.0, moved=2.0, together=3.9) == 1  # noise
