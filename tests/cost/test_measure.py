"""Measuring this machine, for real, with two processes."""

from __future__ import annotations

from autopar.cluster.calibration import _measure, fit, measured_node


def test_two_processes_measure_themselves() -> None:
    figures = _measure(2)
    node = measured_node(2, 2, figures)
    assert node.devices == 2
    assert node.device.peak("f32") > 1e8
    assert node.device.bandwidth > 1e7
    kinds = {kind for kind, _ in node.link.measured}
    assert {"all_reduce", "all_gather"} <= kinds
    assert all(alpha > 0 and rate > 0 for alpha, rate in node.link.measured.values())


def test_noise_never_gives_an_endless_bandwidth() -> None:
    timings = [("all_reduce", 2, 1000, 1e-3), ("all_reduce", 2, 1_000_000, 0.9e-3)]
    ((_, bandwidth),) = fit(timings).values()
    assert 0 < bandwidth < 1e12
