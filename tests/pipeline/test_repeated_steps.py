"""A schedule that repeats a part takes, keeps and waits as one whose actions are all looked at."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.pipeline import Schedule, check, schedule, simulate
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.memory.step_memory import step_counts
from autopar.pipeline.schedule import RepeatedOrders
from autopar.pipeline.schedules import NAMES, weighed_schedules
from autopar.pipeline.schedules.registry import GENERATORS
from autopar.pipeline.simulation.action_times import MessageCost
from autopar.pipeline.simulation.compute_lower_bound import least_time
from autopar.pipeline.simulation.repeated_step import WORTH, repeated_step

FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES if GENERATORS[name].period(4) is not None),
    ("interleaved", {"chunks": 1}),
    ("interleaved", {"chunks": 3}),
    ("chimera", {"scale": "doubling"}),
    ("chimera", {"scale": "halving"}),
    ("chimera", {"pipes": 4}),
    ("dualpipe", {"overlap": False}),
    ("dualpipe-v", {"overlap": False}),
]
STAGES = (2, 3, 4, 6)


def forms() -> list[Any]:
    """All schedules that repeat a part, with the numbers of stages for which they exist."""
    rows = []
    for name, options in FORMS:
        for stages in STAGES:
            is_even = name not in ("chimera", "gems", "dualpipe")
            if (is_even or stages % 2 == 0) and stages // 2 % (options.get("pipes", 2) // 2) == 0:
                rows.append(pytest.param(name, options, stages, id=f"{name}-{options}-{stages}"))
    return rows


def both(
    name: str, options: dict[str, Any], stages: int, draw: random.Random
) -> tuple[Schedule, Schedule]:
    """A schedule that repeats a part often, and the same with all of its actions."""
    period = GENERATORS[name].period(stages, **options)
    assert period is not None
    fewest = WORTH * (period.settled + period.microbatches)
    microbatches = draw.randrange(fewest, fewest + 3 * period.microbatches + 3)
    made = schedule(name, stages=stages, microbatches=microbatches, **options)
    return made, replace(made, orders=tuple(made.orders))


def costs(made: Schedule, draw: random.Random) -> dict[str, Any]:
    """Times of each stage, messages over two kinds of links, and sums of gradients."""

    def some(most: float) -> list[float]:
        return [most * draw.uniform(0.2, 1.0) for _ in range(made.stages)]

    backward = some(2.0)
    messages = {
        (pipe, stage, is_forward): MessageCost(
            draw.uniform(0, 0.4), draw.uniform(0, 0.2), pair[0] // 2 == pair[1] // 2
        )
        for pipe, ranks in enumerate(made.placement)
        for first in range(made.stages - 1)
        for stage, is_forward in ((first, True), (first + 1, False))
        if (pair := (ranks[first], ranks[first + 1])) and pair[0] != pair[1]
    }
    return {
        "forward": some(1.0),
        "backward": backward,
        "backward_weight": [draw.uniform(0, 1) * seconds for seconds in backward],
        "message_costs": draw.choice([messages, None]),
        "latency": draw.choice([0.0, 0.3]),
        "sync": draw.choice(["eager", "eager-where-it-helps", "lazy", None]),
        "sync_cost": some(3.0),
        "after_sync": some(0.5),
        "shared_sync": {(0, made.stages - 1): 1.5},
    }


@pytest.mark.parametrize(("name", "options", "stages"), forms())
def test_a_step_takes_and_keeps_as_one_with_all_actions(
    name: str, options: dict[str, Any], stages: int
) -> None:
    draw = random.Random(f"{name}{options}{stages}")
    for _ in range(3):
        made, whole = both(name, options, stages, draw)
        assert isinstance(made.orders, RepeatedOrders)
        assert repeated_step(made) is not None
        assert made == whole
        assert hash(made) == hash(whole)
        assert made.split_stages == whole.split_stages
        check(whole)
        given = costs(made, draw)
        step, expected = simulate(made, **given), simulate(whole, **given)
        close = {"rel": 1e-12, "abs": 1e-12 * expected.makespan}
        assert step.makespan == pytest.approx(expected.makespan, rel=1e-12)
        assert step.step_time == pytest.approx(expected.step_time, rel=1e-12)
        for figures in ("busy", "idle", "bubble_ratio", "uncovered_sync"):
            assert getattr(step, figures) == pytest.approx(getattr(expected, figures), **close)
        for one, other in zip(
            (*step.synchronizations, *step.updates),
            (*expected.synchronizations, *expected.updates),
            strict=True,
        ):
            assert (one.start, one.end) == pytest.approx((other.start, other.end), **close)
        assert step.peak_activations == expected.peak_activations
        assert step.ends == expected.ends
        for recompute in (False, True):
            assert peak_counts(made, recompute=recompute) == peak_counts(whole, recompute=recompute)
        for counts, others in zip(step_counts(made), step_counts(whole), strict=True):
            assert np.array_equal(counts, others)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_its_lower_bound_is_that_of_all_actions(
    name: str, options: dict[str, Any], stages: int
) -> None:
    if options.get("pipes", 2) > stages:
        return
    draw = random.Random(stages)
    made, whole = both(name, options, stages, draw)
    least, expected = least_time(made), least_time(whole)
    assert least == pytest.approx(expected, rel=0.01)  # each is within 0.5% of the minimum
    for _ in range(10):
        parts = [draw.uniform(0.1, 1) for _ in range(2 * made.stages)]
        halves = [part * draw.random() for part in parts[made.stages :]]
        work = sum(parts) + sum(halves)
        forward, inputs = parts[: made.stages], parts[made.stages :]
        both_halves = [a + b for a, b in zip(inputs, halves)]
        scale = made.parts / work
        taken = simulate(
            made,
            forward=[scale * part for part in forward],
            backward=[scale * part for part in both_halves],
            backward_weight=[scale * part for part in halves],
        )
        assert taken.makespan >= least * (1 - 1e-9)


def test_prices_and_peaks_list_no_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(orders: RepeatedOrders) -> None:
        raise AssertionError("all actions are listed")

    monkeypatch.setattr(RepeatedOrders, "_listed", property(refuse))
    repeated = [s for s in weighed_schedules(4, 1024, 16) if isinstance(s.orders, RepeatedOrders)]
    assert {made.name for made in repeated} == {
        "1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-v", "chimera",
    }  # fmt: skip
    for made in repeated:
        timeline = simulate(made, sync="eager", sync_cost=1.0)
        assert timeline.makespan >= made.microbatches * 3
        assert timeline.peak_activations
        assert peak_counts(made, recompute=True)
        assert len(step_counts(made)) == made.ranks == 4
        assert least_time(made) >= 256 * (1 - 1e-5)
        with pytest.raises(AssertionError, match="listed"):
            str(timeline)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
def test_any_number_of_microbatches_has_a_schedule(name: str) -> None:
    for stages in (1, 2, 3, 5):
        for microbatches in range(1, 4 * stages + 2):
            check(schedule(name, stages=stages, microbatches=microbatches))
