"""The pace of a machine: two factors that whole steps show."""

from __future__ import annotations

import random
import warnings

import pytest

from autopar.cluster import Cluster
from autopar.cluster.pace import MeasuredStep, Pace, cache_pace, cached_pace, fit_pace
from autopar.errors import InvalidInput


@pytest.mark.parametrize("pace", [Pace(), Pace(1.5, 2.2), Pace(0.5, 3.0)])
def test_the_factors_of_steps_are_found(pace: Pace) -> None:
    generator = random.Random(0)
    steps = []
    for _ in range(10):
        compute, communication = generator.uniform(0.01, 0.1), generator.uniform(0.0, 0.1)
        measured = compute * pace.compute + communication * pace.communication
        steps.append(MeasuredStep(compute, communication, measured * generator.uniform(0.98, 1.02)))
    found = fit_pace(steps)
    assert found.compute == pytest.approx(pace.compute, rel=0.05)
    assert found.communication == pytest.approx(pace.communication, rel=0.08)


def test_a_factor_without_evidence_stays() -> None:
    found = fit_pace([MeasuredStep(0.1, 0.0, 0.2), MeasuredStep(0.2, 0.0, 0.4)])
    assert found.compute == pytest.approx(2.0, rel=0.03)
    assert found.communication == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    "steps", [[], [MeasuredStep(0.0, 0.0, 2.0)], [MeasuredStep(0.0, 1.0, 1.0)]]
)
def test_the_pace_of_an_absent_part_is_one(steps: list[MeasuredStep]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_pace(steps)
    assert (found.compute, found.communication) == pytest.approx((1.0, 1.0), rel=0.03)


def test_a_paced_cluster_takes_so_many_times_as_long() -> None:
    plain = Cluster.preset("dgx-h100", nodes=2)
    slow = plain.at(Pace(2.0, 4.0))
    assert slow.device.peak("bf16") == plain.device.peak("bf16") / 2
    assert slow.device.overhead == plain.device.overhead * 2
    assert slow.device.host == plain.device.host  # its own
    assert slow.network.bandwidth == plain.network.bandwidth / 4
    assert slow.nodes[0].link.alpha == plain.nodes[0].link.alpha * 4
    assert plain.at(Pace()) == plain


def test_a_host_that_is_the_device_keeps_its_pace() -> None:
    """Copies too: they stay in the memory that it computes on."""
    plain = Cluster.local(2, measure=False)
    host, slow = (one.device.host for one in (plain, plain.at(Pace(2.0, 4.0))))
    assert host.is_device
    assert slow.copied(1e6, copies=3) == pytest.approx(2 * host.copied(1e6, copies=3))
    assert slow.link.throughput == host.link.throughput / 2
    assert slow.processor.peak("f32") == host.processor.peak("f32") / 2
    assert (slow.bandwidth, slow.overhead) == (host.bandwidth / 2, host.overhead * 2)
    assert slow.memory == host.memory


@pytest.mark.parametrize("factors", [(-1, 1), (0.0, 1), (1, float("nan")), ("2", 1)])
def test_invalid_factors_are_refused(factors) -> None:
    with pytest.raises(InvalidInput, match="positive number of times"):
        Pace(*factors)


def test_a_pace_is_cached_by_device_and_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_pace(Pace(1.5, 2.5), "H100", 8)
    assert cached_pace("H100", 8) == Pace(1.5, 2.5)
    assert cached_pace("H100", 4) == cached_pace("A100", 8) == Pace()


@pytest.mark.parametrize("text", ["", '{"compute": 1.', "[]", '{"compute": NaN}', '{"speed": 1}'])
def test_a_file_that_holds_no_pace_is_none(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_pace(Pace(1.5, 2.5), "H100", 8)
    (path,) = tmp_path.glob("autopar/*.json")
    path.write_text(text)
    assert cached_pace("H100", 8) == Pace()
    cache_pace(Pace(1.5, 2.5), "H100", 8)
    assert cached_pace("H100", 8) == Pace(1.5, 2.5)
