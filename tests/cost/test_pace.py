"""The pace of a machine: two factors that whole steps show."""

from __future__ import annotations

import random

import pytest

from autopar.cluster import Cluster
from autopar.cluster.pace import Pace, Step, fit, keep_pace, kept_pace
from autopar.errors import InvalidInput


@pytest.mark.parametrize("pace", [Pace(), Pace(1.5, 2.2), Pace(0.5, 3.0)])
def test_the_factors_of_steps_are_found(pace: Pace) -> None:
    generator = random.Random(0)
    steps = []
    for _ in range(10):
        compute, communication = generator.uniform(0.01, 0.1), generator.uniform(0.0, 0.1)
        measured = compute * pace.compute + communication * pace.communication
        steps.append(Step(compute, communication, measured * generator.uniform(0.98, 1.02)))
    found = fit(steps)
    assert found.compute == pytest.approx(pace.compute, rel=0.05)
    assert found.communication == pytest.approx(pace.communication, rel=0.08)


def test_what_nothing_shows_stays() -> None:
    found = fit([Step(0.1, 0.0, 0.2), Step(0.2, 0.0, 0.4)])
    assert found.compute == pytest.approx(2.0, rel=0.03)
    assert found.communication == pytest.approx(1.0, rel=0.03)


def test_a_paced_cluster_takes_so_many_times_as_long() -> None:
    plain = Cluster.preset("dgx-h100", nodes=2)
    slow = plain.at(Pace(2.0, 4.0))
    assert slow.device.peak("bf16") == plain.device.peak("bf16") / 2
    assert slow.device.overhead == plain.device.overhead * 2
    assert slow.device.host == plain.device.host  # its own
    assert slow.network.bandwidth == plain.network.bandwidth / 4
    assert slow.nodes[0].link.alpha == plain.nodes[0].link.alpha * 4
    assert plain.at(Pace()) == plain


@pytest.mark.parametrize("factors", [(-1, 1), (0.0, 1), (1, float("nan")), ("2", 1)])
def test_what_is_no_factor_is_refused(factors) -> None:
    with pytest.raises(InvalidInput, match="positive number of times"):
        Pace(*factors)


def test_a_pace_is_kept_for_so_many_devices_of_a_kind(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_pace(Pace(1.5, 2.5), "H100", 8)
    assert kept_pace("H100", 8) == Pace(1.5, 2.5)
    assert kept_pace("H100", 4) == kept_pace("A100", 8) == Pace()
