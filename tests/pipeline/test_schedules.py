"""Making schedules by name: placement, options, and errors before anything runs."""

from __future__ import annotations

import random

import pytest

from autopar.errors import InvalidInput
from autopar.pipeline import NAMES, check, schedule, simulate
from autopar.pipeline.schedules import schedule_of_parts, weighed_schedules
from autopar.pipeline.schedules.registry import generator


def test_names():
    assert set(NAMES) == {
        "gpipe", "1f1b", "interleaved", "gems", "chimera", "zb-h1", "zb-v", "dualpipe",
        "dualpipe-v", "chimera-zb", "interleaved-zb", "pipedream", "pipedream-2bw",
        "terapipe",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("chimera", {"stages": 5, "microbatches": 4}, "even number of stages"),
        ("dualpipe", {"stages": 3, "microbatches": 4}, "even number of stages"),
        ("chimera-zb", {"stages": 3, "microbatches": 4}, "even number of stages"),
        ("chimera", {"stages": 8, "microbatches": 8, "pipes": 6}, "pipes=2 or 4 or 8"),
        ("chimera", {"stages": 8, "microbatches": 8, "pipes": 3}, "2k pipes"),
        ("chimera", {"stages": 8, "microbatches": 8, "pipes": 0}, "at least 1"),
        ("chimera", {"stages": 8, "microbatches": 8, "scale": "tripling"}, "doubling, halving"),
        ("interleaved", {"stages": 8, "microbatches": 8, "chunks": 0}, "at least 1"),
        ("interleaved", {"stages": 8, "microbatches": 8, "chunks": 1.5}, "whole number"),
        ("1f1b", {"stages": 8, "microbatches": 8, "chunks": 2}, "the options sync"),
        ("interleaved", {"stages": 8, "microbatches": 8, "pipes": 2}, "options chunks"),
        ("gpipe", {"stages": 0, "microbatches": 8}, "stages"),
        ("gpipe", {"stages": 4, "microbatches": 0}, "microbatches"),
        ("gpipe", {"stages": 4, "microbatches": 2.0}, "microbatches"),
        ("pipe-dreams", {"stages": 4, "microbatches": 2}, "a schedule is one of '1f1b'"),
        ("chimera-zb", {"stages": 4, "microbatches": 4, "forward": [1, 2]}, "4 stages"),
        ("chimera-zb", {"stages": 4, "microbatches": 4, "limit": 1}, "limit"),
        ("chimera-zb", {"stages": 4, "microbatches": 4, "backward_weight": 3}, "split off"),
        ("chimera", {"stages": 4, "microbatches": 4, "scale": "list", "latency": -1}, "latency"),
    ],
)
def test_bad_input(name, sizes, message):
    with pytest.raises(InvalidInput) as error:
        schedule(name, **sizes)
    assert message in str(error.value)


def test_placement_of_chimera():
    made = schedule("chimera", stages=4, microbatches=4, pipes=4)
    assert made.placement == ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2))
    assert made.replicas_of(0) == (0, 3, 2, 1)
    assert made.local_stages(0) == ((0, 0), (1, 3), (2, 2), (3, 1))
    assert made.pipe_of == (0, 1, 2, 3)


def test_an_odd_microbatch_goes_down():
    assert schedule("chimera", stages=4, microbatches=3).pipe_of == (0, 0, 1)


def test_sizes_with_chunks():
    made = schedule("interleaved", stages=4, microbatches=8, chunks=3)
    assert (made.ranks, made.stages, made.chunks, made.pipes) == (4, 12, 3, 1)
    assert [made.rank_of(0, stage) for stage in range(5)] == [0, 1, 2, 3, 0]
    made = schedule("zb-v", stages=3, microbatches=3)
    assert made.placement == ((0, 1, 2, 2, 1, 0),)


def test_a_batch_in_parts_has_half_as_many_microbatches_where_these_are_halved():
    made = schedule_of_parts("chimera", stages=4, parts=8, scale="halving")
    assert made == schedule("chimera", stages=4, microbatches=4, scale="halving")
    assert made.all_parts == 8
    assert schedule_of_parts("1f1b", stages=4, parts=7).microbatches == 7
    with pytest.raises(InvalidInput, match="cuts each micro-batch into 2 parts"):
        schedule_of_parts("chimera", stages=4, parts=7, scale="halving")
    scales = {dict(s.options).get("scale") for s in weighed_schedules(4, 16)} - {None}
    assert scales == {"direct", "doubling", "halving", "list"}


def test_halving_counts_halves():
    made = schedule("chimera", stages=4, microbatches=8, scale="halving")
    assert (made.microbatches, made.parts, made.all_parts) == (8, 2, 16)
    groups = {len(action.microbatches) for order in made.orders for action in order}
    assert groups == {1, 2} or groups == {1}


def test_doubling_pairs_forwards_after_the_first_unit():
    made = schedule("chimera", stages=4, microbatches=16, scale="doubling")
    pairs = {
        action.microbatches[0]
        for order in made.orders
        for action in order
        if action.kind == "F" and len(action.microbatches) == 2
    }
    assert pairs == {8, 10, 12, 14}


def test_planned_schedules_are_sound_and_in_bounds_for_any_times():
    generator = random.Random(3)
    for _ in range(60):
        p = generator.choice([2, 4, 6, 8])
        k = generator.choice([k for k in range(1, p // 2 + 1) if p // 2 % k == 0])
        m = generator.randint(1, 3 * p)
        forward = [generator.choice([0.5, 1, 1.5]) for _ in range(p)]
        backward = [generator.choice([0.7, 2, 4.5]) for _ in range(p)]
        latency = generator.choice([0, 0, 0.1, 1])
        for name, options, most in (
            ("chimera", {"scale": "list"}, p + (latency > 0)),
            ("chimera-zb", {}, p),
        ):
            made = schedule(
                name, stages=p, microbatches=m, pipes=2 * k,
                forward=forward, backward=backward, latency=latency, **options,
            )  # fmt: skip
            check(made)
            timeline = simulate(made, forward, backward, latency=latency)
            assert max(timeline.peak_activations) <= most


def test_a_plan_for_the_measured_times_beats_one_for_equal_times():
    costs = {"forward": 1, "backward": 2.5, "backward_weight": 0.5, "latency": 0.1}
    fitted = schedule("chimera-zb", stages=8, microbatches=24, **costs)
    blind = schedule("chimera-zb", stages=8, microbatches=24)
    assert simulate(fitted, **costs).makespan < simulate(blind, **costs).makespan


def test_a_tighter_limit_keeps_less():
    made = schedule("chimera-zb", stages=8, microbatches=16, limit=5)
    assert max(simulate(made).peak_activations) <= 5


def test_a_name_that_another_module_has_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has registered"):
        generator("1f1b")(lambda stages, microbatches: None)
