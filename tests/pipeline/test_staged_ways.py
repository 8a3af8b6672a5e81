"""Stages of a program: estimates before a staged program is built hold for the built one."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar import Cluster, Mesh
from autopar.candidates.candidate import Candidate
from autopar.candidates.recomputation import AskedRecomputation, Regions
from autopar.candidates.request import Request
from autopar.candidates.staged import KnownLines, StagedProgram, StagedWay
from autopar.capture import capture
from autopar.cluster.cluster_part import PipelineLine
from autopar.errors import InvalidInput
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.memory.memory_items import MemoryItem
from autopar.pipeline.schedules import schedule, weighed_schedules
from autopar.pipeline.stages.stage_tables import price_stages
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints
from autopar.search.propagation import propagate, with_batch_axis
from autopar.states import NAMED
from tests.models import Case, gpt
from tests.pipeline.models import residuals

STAGES, PARTS, MESH = 2, 4, Mesh(pp=2, dp=2)
SAMPLED = [name for name in NAMED if name != "zero2"]
CLUSTER = Cluster.preset("dgx-a100")
LEANER = (Recompute("full", "cut"), Recompute("full", "host"))
LINE = PipelineLine.of(MESH, "pp")


def test_an_order_is_weighed_under_one_name() -> None:
    for stages, microbatches in ((2, 2), (2, 4), (4, 4), (4, 8)):
        made = weighed_schedules(stages, microbatches)
        assert len({(one.placement, one.orders, one.parts) for one in made}) == len(made)
        names = {one.name for one in made}
        assert names >= {"1f1b", "chimera", "zb-h1"}


def test_as_many_chunks_as_blocks_allow_are_weighed() -> None:
    def chunks(*numbers: int) -> list[int]:
        return [one.chunks for one in weighed_schedules(*numbers) if one.name == "interleaved"]

    assert chunks(4, 8) == chunks(4, 8, 11) == [2]
    assert chunks(4, 8, 12) == chunks(4, 8, 15) == [2, 3]
    assert chunks(16, 16, 126) == [2, 7]
    assert chunks(16, 64, 256) == [2, 4]  # the order of more takes too long to look at


class Beside(nn.Module):
    """Linears whose results are added: they have one gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.one(h) + self.other(torch.relu(h))


class Squares(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def beside() -> Case:
    model = Squares(*(Beside(16) for _ in range(9))).double()
    return Case("beside", model, (torch.zeros(48, 16, dtype=torch.float64),))


# Of the others most is what is kept for backward.
CASES = {
    "gpt": lambda: gpt(layers=6, batch=16),
    "long": lambda: gpt(layers=5, batch=8, hidden=16, heads=2, sequence=32, vocabulary=31),
    "residuals": lambda: residuals(36, 9),
    "beside": beside,
}


@cache
def _whole(
    name: str = "gpt", parts: int = PARTS, line: PipelineLine = LINE
) -> tuple[Candidate, Regions]:
    """A program of one micro-batch, its batch cut over two ranks."""
    case, inner = CASES[name](), MESH.without("pp")
    captured = capture(case.model, case.args, case.kwargs)
    batches = cut_batch(captured, parts)
    asked = with_batch_axis(batches.captured, inner, "dp", Constraints())
    decisions = propagate(batches.captured, inner, asked)
    laid = Candidate.laid_out(batches.captured, CLUSTER, decisions, batches, line=line)
    return laid, Regions(captured, AskedRecomputation())


@cache
def _ways(states: str) -> list[StagedWay]:
    """Those of all schedules and kinds of recomputation; whole states come first, as they do where
    plans are made."""
    whole, regions = _whole()
    request = Request(CLUSTER, "data", math.inf, False, "pp", MESH, STAGES, PARTS)
    tried, ways = KnownLines(), list[StagedWay]()
    for name in dict.fromkeys(("whole", states)):
        program = StagedProgram(whole.placed(NAMED[name]), STAGES, request, regions, (), tried)
        ways.clear()
        for made in weighed_schedules(STAGES, PARTS):
            for kind in (*regions.kinds, *LEANER):
                try:
                    ways.append(program.fastest(made, kind))
                except InvalidInput:  # fewer layers than stages
                    break
    return ways


@pytest.mark.parametrize("states", SAMPLED)
def test_a_way_takes_what_its_program_takes(states: str) -> None:
    assert len(_ways(states)) >= 10
    for way in _ways(states):
        assert way.barest <= way.least <= way.candidate.memory.peak
        assert str(way.candidate.states) == states


ASKED = [
    ("long", 2, "zero3", "1f1b gpipe zb-h1 zb-v"),
    ("residuals", 3, "whole", "interleaved zb-h1 zb-v"),
    ("beside", 4, "whole", "gpipe 1f1b interleaved zb-h1 zb-v chimera chimera-zb dualpipe-v"),
    ("beside", 3, "zero3", "zb-v 1f1b zb-h1"),
]


@pytest.mark.filterwarnings("ignore:batch norm")
@pytest.mark.parametrize(("name", "stages", "states", "schedules"), ASKED)
def test_no_way_holds_less_than_is_told(
    name: str, stages: int, states: str, schedules: str
) -> None:
    mesh, parts = Mesh(pp=stages, dp=2), 2 * stages
    whole, regions = _whole(name, parts, PipelineLine.of(mesh, "pp"))
    request = Request(CLUSTER, "data", math.inf, False, "pp", mesh, stages, parts)
    laid = whole.placed(NAMED[states])
    program = StagedProgram(laid, stages, request, regions, (), KnownLines())
    kinds = [*regions.kinds, *LEANER]
    for number, schedule_name in enumerate(schedules.split()):
        made = schedule(schedule_name, stages=stages, microbatches=parts)
        for kind in {kinds[number % len(kinds)], *kinds[:3][:: 1 + (number % 2)]}:
            way = program.fastest(made, kind)
            assert way.barest <= way.least <= way.candidate.memory.peak
            taken = way.candidate.taken_by_stages(way.pipelining)
            for at, (stage, held) in enumerate(zip(way.pipelining.stages, taken.values())):
                assert stage.activations == held.sizes[MemoryItem.KEPT]
                if at in made.split_stages:
                    assert stage.weight_halves <= held.sizes[MemoryItem.HALVES]


@pytest.mark.parametrize("states", SAMPLED)
def test_stages_are_those_of_a_program_that_is_looked_at_alone(states: str) -> None:
    seen = set()
    for way in _ways(states):
        kind = next(iter(way.candidate.decisions.recompute.values()), None)
        if kind in seen:
            continue
        seen.add(kind)
        whole = _whole()[0].placed(NAMED[states])
        program = whole.recomputed(way.candidate.decisions.recompute)
        alone = Candidate.laid_out(
            program.captured, CLUSTER, program.decisions, program.batches, line=LINE
        )
        starts = [stage.starts for stage in way.pipelining.stages]
        hardware = alone.stage_hardware(way.pipelining.schedule.placement, math.inf)
        expected = price_stages(alone.stage_costs(), starts, hardware)
        for one, two in zip(way.pipelining.stages, expected, strict=True):
            numbers = [list(vars(stage).values())[2:] for stage in (one, two)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)
    assert len(seen) >= 3
