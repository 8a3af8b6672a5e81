"""Ways to run a program in stages: what is told of one before its program is made is true of it."""

from __future__ import annotations

import math
from functools import cache

import pytest

from autopar import Cluster, Mesh
from autopar.capture import capture
from autopar.errors import InvalidInput
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.schedules import weighed_schedules
from autopar.pipeline.stages.costs import price_stages
from autopar.planner.candidate import Candidate
from autopar.planner.recomputation import AskedRecomputation, Regions
from autopar.planner.request import Request
from autopar.planner.staged import StagedProgram, StagedWay, Tried
from autopar.search.constraints import Constraints
from autopar.search.propagate import propagate, with_batch_axis
from autopar.states import NAMED
from tests.models import gpt

STAGES, PARTS, MESH = 2, 4, Mesh(pp=2, dp=2)
CLUSTER = Cluster.preset("dgx-a100")


@cache
def _whole() -> tuple[Candidate, Regions]:
    """A program of one micro-batch, its batch cut over two ranks."""
    case, inner = gpt(layers=6, batch=16), MESH.without("pp")
    captured = capture(case.model, case.args, case.kwargs)
    batches = cut_batch(captured, PARTS)
    asked = with_batch_axis(batches.captured, inner, "dp", Constraints())
    decisions = propagate(batches.captured, inner, asked)
    laid = Candidate(batches.captured, CLUSTER, decisions, batches)
    return laid, Regions(captured, AskedRecomputation())


@cache
def _ways(states: str) -> list[StagedWay]:
    """Those of all schedules and kinds of recomputation; whole states come first, as they do where
    plans are made."""
    whole, regions = _whole()
    request = Request(CLUSTER, "data", math.inf, False, "pp", MESH, STAGES, PARTS)
    tried, ways = Tried(), list[StagedWay]()
    for name in dict.fromkeys(("whole", states)):
        program = StagedProgram(whole.placed(NAMED[name]), STAGES, request, regions, (), tried)
        ways.clear()
        for made in weighed_schedules(STAGES, PARTS):
            for kind in (*regions.kinds, *regions.leaner(CLUSTER.device.host)):
                try:
                    ways.append(program.fastest(made, kind))
                except InvalidInput:  # fewer layers than stages
                    break
    return ways


@pytest.mark.parametrize("states", NAMED)
def test_a_way_takes_what_its_program_takes(states: str) -> None:
    assert len(_ways(states)) >= 10
    for way in _ways(states):
        assert way.barest <= way.least <= way.candidate.memory.peak
        assert str(way.candidate.states) == states


@pytest.mark.parametrize("states", NAMED)
def test_stages_are_those_of_a_program_that_is_looked_at_alone(states: str) -> None:
    seen = set()
    for way in _ways(states):
        kind = next(iter(way.candidate.decisions.recompute.values()), None)
        if kind in seen:
            continue
        seen.add(kind)
        whole = _whole()[0].placed(NAMED[states])
        program = whole.recomputed(way.candidate.decisions.recompute)
        alone = Candidate(program.captured, CLUSTER, program.decisions, program.batches)
        line = alone.stage_costs(MESH, "pp")
        expected = price_stages(line, [stage.starts for stage in way.pipelining.stages])
        for one, two in zip(way.pipelining.stages, expected, strict=True):
            numbers = [list(vars(stage).values())[2:] for stage in (one, two)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)
    assert len(seen) >= 3
