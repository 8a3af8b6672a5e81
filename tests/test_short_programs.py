"""A short program of many equal blocks says of every way what the whole one says."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import pytest

from autopar import Cluster, Mesh
from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import RecomputeAssignment
from autopar.candidates.recomputation import AskedRecomputation, Regions
from autopar.candidates.request import Request
from autopar.candidates.staged import KnownLines, StagedProgram
from autopar.candidates.unfolded import unfolded
from autopar.candidates.whole import Whole
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.folding import fold
from autopar.capture.regions import blocks
from autopar.cluster.cluster_part import PipelineLine
from autopar.cost.footprint import Memory
from autopar.options import PlanOptions, read_request
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedules import weighed_schedules
from autopar.pipeline.stages.cut import choose_stages
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.planner import asker
from autopar.planner.loop import Planner
from autopar.recompute import FULL, PLAIN, SELECTIVE, Recompute
from autopar.search.constraints import Constraints
from autopar.search.layout_search import LayoutSearch
from autopar.states import NAMED, States
from tests import large_models, models
from tests.models import Case

LAYERS, STAGES, PARTS, MESH = 16, 4, 8, Mesh(x=2)
LINE = PipelineLine("pp", STAGES, 2)


def roomy(cluster: Cluster) -> Cluster:
    """Devices that have room for anything."""
    nodes = (replace(node, device=replace(node.device, memory=1e18)) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


CLUSTER = roomy(Cluster.preset("dgx-h100"))  # whose host is at the end of a link
MAKERS = {
    "gpt2": partial(models.gpt2, batch=16),
    "llama": partial(models.llama, batch=16),
    "t5": partial(models.t5, batch=16),  # two rows of blocks, of which one reads the other
    # Its sequence is cut, and with it what all blocks know of places.
    "long": partial(large_models.llama3_70b, batch=PARTS),
}
KINDS = {
    "": None,
    "selective": Recompute("selective"),
    "full": Recompute("full"),
    "full, cut": Recompute("full", "cut"),
}


class Program(NamedTuple):
    """A model, captured, and its short program."""

    case: Case
    captured: Captured
    short: Captured

    @property
    def whole(self) -> Whole:
        return Whole(self.short, read_request(PlanOptions(cluster=CLUSTER)))


@cache
def program(name: str, layers: int = LAYERS) -> Program:
    case = MAKERS[name](layers=layers)
    captured = capture(case.model, case.args, case.kwargs)
    short = fold(captured)
    assert short.is_folded
    return Program(case, captured, short)


@cache
def laid(name: str, layers: int = LAYERS) -> Candidate:
    """The short program with the layouts that are best for it."""
    batches = cut_batch(program(name, layers).short, PARTS)
    search = LayoutSearch(batches.captured, CLUSTER, lambda mesh: Constraints(), None, PARTS)
    decisions = search.run([MESH]).decisions
    return Candidate.laid_out(batches.captured, CLUSTER, decisions, batches, line=LINE)


def in_stages(way: Candidate, schedule: str, costs: StageCosts) -> Candidate:
    """The same as a pipeline, in the stages that are fastest."""
    made = next(one for one in weighed_schedules(STAGES, PARTS) if one.name == schedule)
    hardware = way.stage_hardware(made.placement, float("inf"))
    stages = tuple(choose_stages(costs, len(hardware), hardware=hardware))
    mesh = Mesh(pp=STAGES, **MESH.sizes)
    shared = costs.shared_sums(stages)
    pipelining = Pipelining("pp", mesh, made, stages, shared)
    return way.changed(None, pipelining, stage_costs=costs)


def assert_same(short: Candidate, whole: Candidate) -> None:
    assert not whole.captured.is_folded
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-9)
    for one, other in zip(short.memories, whole.memories, strict=True):
        assert one.parts == pytest.approx(other.parts, rel=1e-9, abs=1)
        for about in fields(Memory):
            if about.name in ("at_peak", "gathered"):
                continue  # of groups that have room for several blocks there are fewer
            expected = pytest.approx(getattr(other, about.name), rel=1e-9, abs=1)
            assert getattr(one, about.name) == expected, about.name


SCHEDULES = ("1f1b", "zb-h1"), ("chimera", "interleaved")
# Models with states, recomputation and schedules.
WAYS = [
    ("gpt2", "whole", "", SCHEDULES[0]),
    ("gpt2", "zero1", "selective", SCHEDULES[1]),
    ("gpt2", "zero3", "", SCHEDULES[1]),
    ("llama", "zero2", "full", SCHEDULES[0]),
    ("llama", "zero3", "selective", SCHEDULES[0]),
    ("llama", "whole", "full, cut", SCHEDULES[1]),
    ("t5", "zero1", "full", SCHEDULES[0]),
    ("t5", "zero3", "selective", SCHEDULES[1]),
]


@pytest.mark.parametrize(("name", "states", "kind", "schedules"), WAYS)
def test_a_step_takes_what_it_takes_of_the_whole_program(
    name: str, states: str, kind: str, schedules: tuple[str, ...]
) -> None:
    own, plain = program(name), laid(name).placed(States.of(states))
    regions = own.whole.regions.free
    way = plain
    if (how := KINDS[kind]) is not None:
        way = plain.recomputed(
            {region: how for region in regions if region in own_regions(own.short)}
        )
    costs = way.stage_costs(beside=plain.stage_line)
    straight = way.with_program(line=None)
    whole = unfolded(straight)
    assert_same(straight, whole)
    bare = replace(whole.decisions, apart={}, recompute={})
    placed = whole.with_program(decisions=bare, states=States()).placed(whole.states)
    assert whole.decisions.apart == placed.decisions.apart
    again = placed.recomputed(whole.decisions.recompute).rewritten
    assert [node.name for node in whole.rewritten.nodes] == [node.name for node in again.nodes]
    for schedule in schedules:
        one = in_stages(way, schedule, costs)
        assert_same(one, unfolded(one))


PIECES = Recompute("selective", "cut")


@pytest.mark.parametrize(
    ("states", "kind"), [("zero1", PLAIN), ("zero2", FULL), ("zero2", PIECES), ("zero3", PIECES)]
)
def test_in_stages_states_take_what_they_take_of_the_whole_program(
    states: str, kind: Recompute
) -> None:
    """Whole states are looked at before others, as they are where plans are made."""
    own, whole, tried = program("gpt2"), laid("gpt2"), KnownLines()
    request = Request(CLUSTER, "auto", math.inf, False, "pp", stages=STAGES, microbatches=PARTS)
    regions = Regions(own.short, AskedRecomputation())
    made, *_ = weighed_schedules(STAGES, PARTS)
    for name in ("whole", states):
        laid_out = whole.placed(NAMED[name])
        staged = StagedProgram(laid_out, STAGES, request, regions, (), tried)
        found = staged.fastest(made, kind).candidate
        assert_same(found, unfolded(found))


HOSTED = Recompute("selective", "host")
MIXES = [
    [(9, PLAIN), (10, FULL), (9, SELECTIVE)],
    [(2, SELECTIVE), (17, Recompute("full", "cut")), (9, PLAIN)],
    [(8, FULL), (1, PLAIN), (8, HOSTED), (11, FULL)],
    [(5, FULL), (7, PLAIN), (5, SELECTIVE), (6, PLAIN), (5, FULL)],  # too few for any to stand
]


@pytest.mark.parametrize(
    ("name", "states", "runs"),
    [
        *itertools.product(("gpt2", "llama"), ("whole", "zero3"), MIXES),
        ("long", "zero3", [(9, HOSTED), (10, PLAIN), (9, HOSTED)]),
        ("t5", "zero3", [(20, FULL), (57, PLAIN), (30, SELECTIVE), (33, FULL)]),
    ],
)
def test_blocks_that_are_treated_alike_stand_for_each_other(
    name: str, states: str, runs: list[tuple[int, Recompute]]
) -> None:
    own = program(name, 28).whole
    way = laid(name, 28).with_program(line=None).placed(States.of(states))
    kinds = [kind for count, kind in runs for _ in range(count)]
    short = own.mixed(way, RecomputeAssignment(own.regions.free, kinds, 0.0))
    decided = {region: kind for region, kind in zip(own.regions.free, kinds) if not kind.is_plain}
    whole = unfolded(way).recomputed(decided)
    assert short.decisions.recompute == decided
    assert (short.captured.is_folded) == any(count > 9 for count, _ in runs)
    assert_same(short, whole)
    assert_same(short, unfolded(short))


def own_regions(captured: Captured) -> set[str]:
    return {*blocks(captured)}


@pytest.mark.parametrize("part", [None, 0.6])
def test_the_choice_is_that_of_the_whole_program(part: float | None) -> None:
    own = program("gpt2")
    options = PlanOptions(cluster=roomy(Cluster.local(4, measure=False)), microbatches=4)
    free = of_whole(own, read_request(options))
    if part is not None:
        options = replace(options, memory=part * free.memory.peak)
        free = of_whole(own, read_request(options))
    request = read_request(options)
    (best,) = Planner(own.case.model, own.captured, request, quiet).best()
    best = unfolded(best)
    assert best.fits(request.memory)
    assert best.seconds <= free.seconds * (1.01 + 1e-9)


def of_whole(own: Program, request: Request) -> Candidate:
    """The choice without a short program."""
    with patch.object(asker, "fold", lambda captured, *_: captured):
        return Planner(own.case.model, own.captured, request, quiet).best()[0]


def quiet(phase: str, detail: str) -> None:
    """Nobody is told."""
