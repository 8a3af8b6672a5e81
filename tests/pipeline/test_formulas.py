"""Closed forms of makespan and peak activations, for all even p <= 16, m <= 4p and every k.

Beyond p = 4, every third m stands for all, beyond p = 8 every seventh: of all remainders.
"""

from __future__ import annotations

import pytest

from autopar.pipeline import Schedule, Timeline, schedule, simulate

STAGES = (2, 4, 6, 8, 10, 12, 14, 16)
RATIOS = (1, 2, 3)  # backward over forward
every_p = pytest.mark.parametrize("p", STAGES)


def excess(made: Schedule, backward: float = 2) -> float:
    """The makespan beyond m(F + B)."""
    return simulate(made, 1, backward).makespan - made.microbatches * (1 + backward)


def made_for(name: str, p: int, m: int, **options) -> Schedule:
    return schedule(name, stages=p, microbatches=m, **options)


def priced(name: str, p: int, m: int, **options) -> Timeline:
    return simulate(made_for(name, p, m, **options))


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


def ks(p: int) -> list[int]:
    return [k for k in range(1, p // 2 + 1) if p // 2 % k == 0]


def some(p: int, numbers: range) -> range:
    return numbers[:: 1 if p <= 4 else 3 if p <= 8 else 7]


@every_p
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b(name, p):
    for m in some(p, range(1, 4 * p + 1)):
        made = made_for(name, p, m)
        peaks = [m if name == "gpipe" else min(p - s, m) for s in range(p)]
        assert list(simulate(made).peak_activations) == peaks
        for backward in RATIOS:
            assert excess(made, backward) == (p - 1) * (1 + backward)


@every_p
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(v, p):
    for m in range(p, 4 * p + 1, p):
        made = made_for("interleaved", p, m, chunks=v)
        peaks = [min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) / v for r in range(p)]
        assert list(simulate(made).peak_activations) == close(peaks)
        for backward in RATIOS:
            assert excess(made, backward) == close((p - 1) * (1 + backward) / v)


@every_p
def test_gems(p):
    for m in some(p, range(1, 4 * p + 1)):
        timeline = priced("gems", p, m)
        assert timeline.makespan == p + m * p * 2 + (m - 1)
        assert set(timeline.peak_activations) == {1}


@every_p
def test_zero_bubble(p):
    for m in some(p, range(p, 4 * p + 1)):
        timeline = priced("zb-h1", p, m)
        assert timeline.makespan == 3 * m + p - 1
        assert set(timeline.peak_activations) == {p}
    for m in some(p, range(2 * p, 4 * p + 1)):
        timeline = priced("zb-v", p, m)
        assert timeline.makespan == 3 * m + (p - 1) / 2
        assert set(timeline.peak_activations) == {p}


@every_p
def test_dualpipe(p):
    for m in some(p, range(2 * p, 4 * p + 1, 2)):
        timeline = priced("dualpipe", p, m)
        assert timeline.makespan == 3 * m + p - 2
        assert max(timeline.peak_activations) == p + 1
        assert priced("dualpipe", p, m, overlap=False).makespan == 3 * m + p / 2 - 1
    for m in some(p, range(2 * p, 4 * p + 1)):
        timeline = priced("dualpipe-v", p, m)
        assert timeline.makespan == 3 * m + p - 1
        assert max(timeline.peak_activations) == p + 0.5
        assert priced("dualpipe-v", p, m, overlap=False).makespan == 3 * m + (p - 1) / 2


@every_p
def test_chimera_with_p_microbatches(p):
    for k in ks(p):
        made = made_for("chimera", p, p, pipes=2 * k)
        peaks = simulate(made).peak_activations
        assert made.pipes == 2 * k
        assert (min(peaks), max(peaks)) == (p - p / (2 * k) + 1, p)
        if k == 1:
            assert list(peaks) == [p / 2 + 1 + min(w, p - 1 - w) for w in range(p)]
        for backward in RATIOS:
            expected = p + (p + p / k - 2) * backward
            assert simulate(made, 1, backward).makespan == expected


@every_p
def test_bubble_ratios_of_the_paper(p):
    for m in range(p, 4 * p + 1, p):
        timeline = simulate(made_for("chimera", p, m), 1, 1)
        assert timeline.bubble_ratio == close((p - 2) / (2 * m + p - 2))
        if m % (2 * p) == 0:
            doubling = priced("chimera", p, m, scale="doubling")
            assert doubling.bubble_ratio == close((p - 2) / (2 * m + p - 2))
    assert priced("chimera", p, p).bubble_ratio == close((p - 2) / (3 * p / 2 + p - 2))
    for k in ks(p):
        timeline = simulate(made_for("chimera", p, p, pipes=2 * k), 1, 1)
        assert timeline.bubble_ratio == close((p - 2 * k) / (2 * k * p + p - 2 * k))


@every_p
def test_chimera_with_fewer_than_p_microbatches(p):
    for m in range(1, p):
        made = made_for("chimera", p, m)
        for backward in RATIOS:
            expected = p * (1 + backward) + (2 * -(-m // 2) - 2) * backward
            assert simulate(made, 1, backward).makespan == expected


@every_p
def test_direct_concatenation(p):
    for big_k in range(1, 5):
        for k in ks(p):
            made = made_for("chimera", p, big_k * p, pipes=2 * k)
            assert max(simulate(made).peak_activations) == p
            for backward in RATIOS:
                expected = (p / k - 2) * (big_k * (backward - 1) + 1)
                assert excess(made, backward) == expected


@every_p
def test_forward_doubling(p):
    for units in range(2, 9):  # of p micro-batches; with one there is nothing to double
        made = made_for("chimera", p, units * p, scale="doubling")
        odd = (p - 2) * (units % 2)
        assert excess(made, 2) == 1.5 * (p - 2) + odd
        assert excess(made, 3) == (p - 2) * (1 + units // 2) + odd * 2
        peaks = simulate(made).peak_activations
        assert max(peaks) == 2 * p
        assert peaks[0] < 2 * p or p == 2


@every_p
def test_backward_halving(p):
    for units in range(2, 9):  # of p/2 micro-batches
        made = made_for("chimera", p, units * p // 2, scale="halving")
        assert excess(made, 2) == 0.75 * (p - 2) + (p - 2) * (units % 2) / 2
        doubled = made_for("chimera", p, units * p, scale="doubling")
        halves = [2 * peak for peak in simulate(made).peak_activations]
        assert halves == list(simulate(doubled).peak_activations)


@every_p
def test_list_scheduling(p):
    for m in some(p, range(p, 4 * p + 1, 2)):
        made = made_for("chimera", p, m, scale="list")
        assert max(simulate(made).peak_activations) == p
        assert excess(made) == (p - 2) * 2
        assert excess(made, 3) == (p - 2) * 3


@every_p
def test_chimera_with_split_backward(p):
    for k in ks(p):
        timeline = priced("chimera-zb", p, p, pipes=2 * k)
        assert max(timeline.peak_activations) <= p
        if k == 1:
            assert timeline.makespan == 3 * p + p / 2 - 1
