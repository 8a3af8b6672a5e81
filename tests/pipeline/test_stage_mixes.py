"""Mixes inside stages: the real program takes what was added up, fits, and is never slower."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from autopar import Mesh
from autopar.candidates.candidate import Candidate
from autopar.candidates.recomputation import KINDS, AskedRecomputation, Regions
from autopar.candidates.request import Request
from autopar.candidates.stage_mixes import MixedWay, StageMixes
from autopar.candidates.staged import KnownLines, StagedProgram, StagedWay
from autopar.capture import capture
from autopar.cluster.cluster_part import PipelineLine
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.schedules import schedule
from autopar.pipeline.stages.mixed_stages import MixOptions, fastest_options
from autopar.recompute import FULL, PLAIN
from autopar.search.constraints import Constraints
from autopar.search.propagation import propagate, with_batch_axis
from autopar.states import NAMED
from tests.models import Case, gpt
from tests.parity import assert_parity
from tests.pipeline.test_staged_ways import CLUSTER

PARTS = 8
SCHEDULES = [("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("chimera", 4)]
LIMITS = (0.0, 0.3, 0.6, 1.0)  # from what all regions in full take to what none takes
ATTEMPTS = 4


@cache
def case() -> Case:
    return gpt(layers=8, batch=16, hidden=32, heads=2, sequence=32, vocabulary=31)


@cache
def staged(stages: int, states: str = "whole") -> StagedProgram:
    one, mesh = case(), Mesh(pp=stages, dp=2)
    captured = capture(one.model, one.args, one.kwargs)
    batches = cut_batch(captured, PARTS)
    inner = mesh.without("pp")
    asked = with_batch_axis(batches.captured, inner, "dp", Constraints())
    decisions = propagate(batches.captured, inner, asked)
    line = PipelineLine.of(mesh, "pp")
    laid = Candidate.laid_out(batches.captured, CLUSTER, decisions, batches, line=line)
    request = Request(CLUSTER, "data", math.inf, False, "pp", mesh, stages, PARTS)
    regions = Regions(captured, AskedRecomputation())
    return StagedProgram(laid.placed(NAMED[states]), stages, request, regions, (), KnownLines())


def fitting(program: StagedProgram, name: str, stages: int, memory: float) -> MixedWay:
    """Return a mix of which the real program fits."""
    mixes, made = StageMixes(program, None), schedule(name, stages=stages, microbatches=PARTS)
    for _ in range(ATTEMPTS):
        way = mixes.fastest(made, memory)
        assert way is not None
        if way.candidate.fits(memory):
            return way
        mixes.note(way)
    raise AssertionError("the real program is refused again and again")


def alike(program: StagedProgram, name: str, stages: int) -> dict[str, StagedWay]:
    made = schedule(name, stages=stages, microbatches=PARTS)
    return {str(kind): program.fastest(made, kind) for kind in KINDS}


def limits(program: StagedProgram, name: str, stages: int) -> list[float]:
    ways = alike(program, name, stages)
    least, most = (ways[str(kind)].candidate.memory.peak for kind in (FULL, PLAIN))
    return [(least + share * (most - least)) * (1 + 1e-9) for share in LIMITS]


@pytest.mark.parametrize(("name", "stages"), SCHEDULES)
def test_the_real_program_takes_what_was_added_up_and_is_not_slower(name: str, stages: int) -> None:
    program, faster = staged(stages), 0
    for memory in limits(program, name, stages):
        way = fitting(program, name, stages, memory)
        assert way.candidate.seconds == pytest.approx(way.seconds, rel=1e-9)
        fit = [w.seconds for w in alike(program, name, stages).values() if w.candidate.fits(memory)]
        assert way.seconds <= min(fit) * (1 + 1e-9)
        faster += way.seconds < min(fit) * (1 - 1e-3)
    assert faster


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_it_is_so_with_states_that_are_cut(states: str) -> None:
    program = staged(4, states)
    memory = limits(program, "1f1b", 4)[2]
    way = fitting(program, "1f1b", 4, memory)
    assert way.candidate.seconds == pytest.approx(way.seconds, rel=1e-9)
    assert str(way.candidate.states) == states


def test_nothing_fits_into_less_than_all_regions_in_full_need() -> None:
    program = staged(4)
    made = schedule("1f1b", stages=4, microbatches=PARTS)
    least = min(way.candidate.memory.peak for way in alike(program, "1f1b", 4).values())
    assert StageMixes(program, None).fastest(made, 0.5 * least) is None


def test_the_first_stages_run_more_again_than_the_last() -> None:
    program = staged(4)
    way = fitting(program, "1f1b", 4, limits(program, "1f1b", 4)[1])
    again = [stage.again / stage.forward for stage in way.pipelining.stages]
    assert again[0] == max(again)
    assert again[-1] == 0


def test_a_mixed_plan_computes_what_one_device_computes() -> None:
    way = fitting(staged(2), "1f1b", 2, limits(staged(2), "1f1b", 2)[1])
    assert len(set(way.decided.values())) == 2
    assert len(way.decided) < 8
    options = {"schedule": "1f1b", "microbatches": PARTS, "recompute": dict(way.decided)}
    module = assert_parity(case(), Mesh(pp=2, dp=2), mode="data", **options)
    assert module.plan.decisions.recompute == way.decided


def options_of(random: np.random.Generator, regions: int, columns: int) -> MixOptions:
    """Return the mixes of a stage whose regions run in one of three ways."""
    again, kept = np.sort(random.random(3))[::-1], np.sort(random.random((3, columns)), axis=0)
    ends = np.array([*combinations_with_replacement(range(regions + 1), 2)])
    ends = np.pad(ends, ((0, 0), (1, 1)), constant_values=(0, regions))
    counts = np.diff(ends)
    return MixOptions(1 + counts @ again, counts @ kept, ends)


@pytest.mark.parametrize("seed", range(20))
def test_the_mix_of_one_stage_is_the_fastest_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    options = options_of(random, regions=6, columns=4)
    counts = random.integers(0, 5, (3, 4)).astype(float)
    sizes = options.bytes(counts)
    rooms = sizes.min(axis=0) + random.random(3) * np.ptp(sizes, axis=0)
    chosen = fastest_options([options], [counts], rooms)
    fits = (sizes <= rooms).all(axis=1)
    assert (chosen is None) == (not fits.any())
    if chosen is not None:
        assert fits[chosen[0]]
        assert options.seconds[chosen[0]] == pytest.approx(options.seconds[fits].min())


def test_no_mix_is_found_where_rounding_seems_to_spare_bytes() -> None:
    """A missing byte count such as 0.4 - 0.3 is not what 0.4 plus and minus it gives."""
    alone = MixOptions(np.ones(1), np.array([[0.4]]), np.zeros((1, 2), np.int64))
    assert fastest_options([alone], [np.ones((1, 1))], np.array([0.3])) is None


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stages", [2, 3])
def test_mixes_of_stages_that_share_memory_fit_and_are_the_fastest(seed: int, stages: int) -> None:
    random = np.random.default_rng(seed)
    options = [options_of(random, regions=3, columns=2) for _ in range(stages)]
    counts = [random.integers(1, 5, (4, 2)).astype(float) for _ in options]
    sizes = [one.bytes(count) for one, count in zip(options, counts)]
    rooms = sum(0.5 * (size.min(axis=0) + size.max(axis=0)) for size in sizes)
    chosen = fastest_options(options, counts, rooms)
    assert chosen is not None
    assert (sum(size[at] for size, at in zip(sizes, chosen)) <= rooms).all()
    taken = sum(one.seconds[at] for one, at in zip(options, chosen))
    best = min(
        sum(one.seconds[at] for one, at in zip(options, every))
        for every in product(*(range(len(one.seconds)) for one in options))
        if (sum(size[at] for size, at in zip(sizes, every)) <= rooms).all()
    )
    # Of three stages, two at a time are looked at together.
    worst = sum(one.seconds.max() for one in options)
    assert taken - best <= (1e-9 if stages == 2 else 0.1) * (worst - best)
