"""Numbers that were worked out by hand or published, exactly."""

from __future__ import annotations

import pytest

from autopar.pipeline import Timeline, check, schedule, simulate


def priced(name: str, stages: int, microbatches: int, latency: float = 0, **options) -> Timeline:
    made = schedule(name, stages=stages, microbatches=microbatches, **options)
    check(made)
    return simulate(made, forward=1, backward=2, latency=latency)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "options", "makespan"),
    [
        ("chimera", 4, 4, {}, 16),
        ("chimera", 8, 8, {}, 36),
        ("chimera", 8, 8, {"pipes": 4}, 28),
        ("chimera", 4, 8, {"scale": "direct"}, 30),
        ("chimera", 4, 8, {"scale": "doubling"}, 27),
        ("chimera", 8, 8, {"scale": "halving"}, 28.5),
        ("chimera", 8, 16, {"scale": "list"}, 60),
        ("chimera", 8, 16, {"scale": "direct"}, 66),
        ("chimera-zb", 8, 8, {}, 27),
        ("1f1b", 8, 8, {}, 45),
        ("interleaved", 8, 8, {"chunks": 2}, 34.5),
        ("gems", 4, 4, {}, 39),
        ("zb-h1", 8, 8, {}, 31),
        ("zb-v", 8, 16, {}, 51.5),
        ("dualpipe", 8, 20, {}, 66),
    ],
)
def test_makespan(name, stages, microbatches, options, makespan):
    assert priced(name, stages, microbatches, **options).makespan == makespan


@pytest.mark.parametrize(("stages", "peaks"), [(4, (3, 4, 4, 3)), (8, (5, 6, 7, 8, 8, 7, 6, 5))])
def test_chimera_peaks(stages, peaks):
    assert priced("chimera", stages, stages).peak_activations == peaks


@pytest.mark.parametrize(
    ("name", "options", "makespan"),
    [
        ("zb-v", {}, 107.75),
        ("zb-h1", {}, 110),
        ("dualpipe", {}, 111.25),
        ("interleaved", {}, 114),
        ("chimera", {"scale": "doubling"}, 115),
        ("chimera", {"scale": "list"}, 116.75),
        ("chimera", {"scale": "direct"}, 139.75),
        ("1f1b", {}, 134),
    ],
)
def test_makespan_with_latency(name, options, makespan):
    assert priced(name, 8, 32, latency=0.25, **options).makespan == makespan


def test_list_planned_with_the_latency_is_shorter():
    assert priced("chimera", 8, 32, latency=0.25, scale="list").makespan == 116.75
    planned = schedule("chimera", stages=8, microbatches=32, scale="list", latency=0.25)
    assert simulate(planned, latency=0.25).makespan == 112.25


def test_bubble_ratios_of_chimera():
    assert priced("chimera", 8, 8).bubble_ratio == pytest.approx(6 / (3 * 8 / 2 + 6))
    assert priced("chimera", 8, 8).bubble_ratio == pytest.approx(1 / 3)
    assert priced("chimera-zb", 8, 8).bubble_ratio == pytest.approx(1 / 9)


def test_orders_of_chimera_with_four_stages():
    made = schedule("chimera", stages=4, microbatches=4)
    orders = [
        " ".join(f"{action.kind}{action.microbatches[0]}" for action in order)
        for order in made.orders
    ]
    assert orders[0] == "F0 F1 F2 B2 F3 B3 B0 B1"
    assert orders[1] == "F0 F2 F1 F3 B2 B0 B3 B1"


def test_critical_path_of_chimera():
    path = priced("chimera", 6, 6).critical_path
    assert (path.forwards, path.backwards) == (6, 10)


@pytest.mark.parametrize("stages", [4, 6, 8, 10, 16])
def test_latency_adds_3p_minus_5_messages_to_chimera(stages):
    made = schedule("chimera", stages=stages, microbatches=stages)
    delayed, plain = simulate(made, latency=0.25), simulate(made)
    assert delayed.makespan - plain.makespan == (3 * stages - 5) * 0.25
    assert delayed.critical_path.messages == 3 * stages - 5
