"""Which regions run again: the fastest of all ways that fit, in a program or in one that stands for
it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar import Cluster, Mesh
from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import (
    MixedProblem,
    RecomputeOption,
    grouped,
    members_of,
    mixed_problem,
)
from autopar.candidates.recomputation import FULL, KINDS, PLAIN, AskedRecomputation, Regions
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.folding import fold
from autopar.capture.regions import blocks
from autopar.program.equal_blocks import NO_EQUAL_BLOCKS
from autopar.recompute import Recompute
from autopar.search.propagation import propagate
from autopar.strategies.node_info import info
from tests import models

HOST = Recompute("full", "host")
WAYS = PLAIN, FULL, HOST
MESH = Mesh(dp=2, tp=2)
CLUSTER = Cluster.preset("dgx-a100")
Offers = Mapping[Recompute, RecomputeOption]


def fits(row: Sequence[Offers], kinds: Sequence[Recompute], problem: dict, memory: float) -> bool:
    """What is kept till the backward of each region runs, one region after another."""
    kept = 0.0
    for offer, kind, before in zip(row, kinds, problem["before"]):
        kept += offer[kind].kept
        if kept + offer[kind].remade + before > memory:
            return False
    on_host = sum(offer[kind].on_host for offer, kind in zip(row, kinds))
    return kept + problem["rest"] <= memory and on_host <= problem["host"]


def seconds(row: Sequence[Offers], kinds: Sequence[Recompute]) -> float:
    return sum(offer[kind].seconds for offer, kind in zip(row, kinds))


@pytest.mark.parametrize("seed", range(60))
def test_groups_give_what_all_ways_give(seed: int) -> None:
    draw = random.Random(seed)

    def offer(kind: Recompute) -> RecomputeOption:
        some = [float(draw.randint(0, 9)) for _ in range(3)]
        return RecomputeOption(*some, on_host=float(draw.randint(0, 4)) if kind == HOST else 0.0)

    kinds = [{way: offer(way) for way in WAYS} for _ in range(draw.choice([1, 1, 2]))]
    row = [one for one in kinds for _ in range(draw.randint(1, 6 // len(kinds)))]
    row += [kinds[0]] * (draw.random() < 0.3)
    steps = [draw.choice([0, 2]) if draw.random() < 0.2 else 1 for _ in row]
    before = [float(sum(steps[:at])) for at in range(len(row))]
    if draw.random() < 0.1:  # what runs several times may go backward earlier than what follows
        before[0] = before[-1] + 1
    about = {"before": before, "rest": max(before) + draw.randint(0, 3)}
    about["host"] = float(draw.randint(0, 9))
    problem = MixedProblem([*map(str, row)], grouped(row, before), about["rest"])
    assert sum(group.count for group in problem.groups) == len(row)
    every = list(itertools.product(WAYS, repeat=len(row)))
    for memory in range(3, 60, 7):
        found = problem.solve(memory, about["host"])
        ways = [way for way in every if fits(row, way, about, memory)]
        assert (found is None) == (not ways)
        if found is not None:
            assert fits(row, found.kinds, about, memory)
            assert seconds(row, found.kinds) == min(seconds(row, way) for way in ways)


def test_neighbours_that_are_alike_are_counted() -> None:
    one = {PLAIN: RecomputeOption(0.0, 4.0, 0.0), FULL: RecomputeOption(3.0, 1.0, 2.0)}
    near = {
        kind: replace(offer, seconds=offer.seconds * (1 + 1e-12)) for kind, offer in one.items()
    }
    other = one | {FULL: RecomputeOption(2.0, 1.0, 2.0)}
    row = [one, near, one, other, one, one, one]
    found = grouped(row, [0.0, 5.0, 10.0, 10.0, 11.0, 12.0, 12.0])
    assert [(group.count, group.before, group.step) for group in found] == [
        *((3, 0.0, 5.0), (1, 10.0, 0.0)),
        *((2, 11.0, 1.0), (1, 12.0, 0.0)),  # of which the last has no more before it
    ]
    problem = MixedProblem([str(number) for number in range(3)], grouped([one] * 3, [0.0] * 3), 0.0)
    mix = problem.solve(9.0, 0.0)
    assert mix is not None
    assert mix.runs == [(1, FULL), (2, PLAIN)]
    assert mix.for_short_program == {"0": FULL}


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.down(F.gelu(torch.tanh(self.up(x).sin().cos()))).sin().cos())


class Parts(nn.Module):
    """Blocks of several regions, between which something is kept."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, widths))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) * gate
        return x


class Net(nn.Module):
    def __init__(self, widths: Sequence[int], layers: int = 14) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts(widths) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        gate = x.sigmoid()
        for block in self.blocks:
            x = block(x, gate)
        return x.square().mean()


CASES = {
    "gpt": lambda: models.gpt(layers=14, hidden=16, heads=2),
    "alike": lambda: models.Case("", Net((16, 16)).double(), (torch.zeros(8, 8).double(),)),
    "in turn": lambda: models.Case("", Net((16, 24)).double(), (torch.zeros(8, 8).double(),)),
}


@cache
def captured(name: str) -> Captured:
    case = CASES[name]()
    return capture(case.model, case.args, case.kwargs)


def problem_of(program: Captured, is_alone: bool = False) -> tuple[MixedProblem, Regions]:
    """`is_alone`: no region is looked at for others."""
    laid = Candidate.laid_out(program, CLUSTER, propagate(program, MESH))
    regions = Regions(program, AskedRecomputation())
    ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
    members = members_of(program, regions.free)
    assert members is not None
    graphs = {kind: way.rewritten for kind, way in ways.items()}
    repeats = NO_EQUAL_BLOCKS if is_alone else ways[PLAIN].equal_blocks
    return mixed_problem(graphs, members, laid.prices, repeats), regions


whole_problem = cache(lambda name: problem_of(captured(name)))


@pytest.mark.parametrize("name", CASES)
def test_regions_that_repeat_are_looked_at_once(name: str) -> None:
    """And have the offers that each has."""
    assert whole_problem(name)[0] == problem_of(captured(name), is_alone=True)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_short_program_has_the_problem_of_the_long_one(name: str) -> None:
    short = fold(captured(name))
    assert max(info(node).count for node in short.graph.nodes) > 4
    (found, own), (expected, whole) = problem_of(short), whole_problem(name)
    assert replace(found, members=()) == replace(expected, members=())
    assert len(own.free) < len(found.members) == len(whole.free) == len(expected.members)
    kept = sum(group.count * group.offers[PLAIN].kept for group in found.groups)
    beside = CLUSTER.device.host.memory
    is_said = set[bool]()
    for part in (0.2, 0.5, 0.8, 1.0):
        mix, same = (one.solve(found.rest + part * kept, beside) for one in (found, expected))
        assert mix is not None
        assert same is not None
        assert mix.runs == same.runs
        assert mix.for_regions(whole.free) == same.for_short_program
        is_said.add(mix.for_short_program is not None)
        if mix.for_short_program is not None:
            kinds = [mix.for_short_program.get(name, PLAIN) for name in found.members]
            assert kinds == list(mix.kinds)
    assert is_said == {True, False}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_regions_of_several_blocks_do_not_stand_for_others() -> None:
    short = fold(capture(Layers(), (torch.zeros(2, 4),)))
    assert short.unfolded is not None
    regions = Regions(short, AskedRecomputation())
    assert members_of(short, regions.free) is None
    whole = short.unfolded
    assert members_of(whole, ("layers.0", "layers.1")) == ("layers.0", "layers.1")


class Named(nn.Module):
    """Blocks in modules of these names, of which the first runs once more at the end."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        rows = (nn.Sequential(*(Part(16) for _ in range(3))) for _ in names)
        self.rows = nn.ModuleDict(dict(zip(names, rows)))

    def forward(self, x: Tensor) -> Tensor:
        x = ap.shard(x, ("dp", None))
        for row in (*self.rows.values(), next(iter(self.rows.values()))):
            x = row(x)
        return x.square().mean()


@pytest.mark.parametrize("others", [("body (deep)", "body (deep) (2)"), ("a", "a:a")])
def test_regions_have_any_names(others: tuple[str, str]) -> None:
    def planned(*names: str, **options: object) -> ap.Plan:
        model, x = Named(*names).double(), torch.zeros(64, 8).double()
        return ap.plan(model, (x,), mode="propagate", mesh=MESH, states="whole", **options)

    names = "body", "tail"
    free, full = (planned(*names, recompute=how).memory.peak for how in (None, "full"))
    for part in (0.0, 0.5):
        limit = full + part * (free - full)
        one, other = (planned(*row, memory=limit) for row in (names, others))
        renamed = {
            f"rows.{others[names.index(path)]}.{block}": how
            for name, how in one.decisions.recompute.items()
            for _, path, block in [name.split(".")]
        }
        assert other.decisions.recompute == renamed
        assert renamed
        assert other.memory == one.memory
        assert other.cost == one.cost
    one, other = (planned(*row, recompute=Recompute("full", "cut")) for row in (names, others))
    assert other.memory == one.memory
    assert "no ranks keep it alike" not in f"{one}{other}"


def test_blocks_in_blocks_are_told_once() -> None:
    assert blocks(captured("in turn"))[:3] == (
        *("blocks.0.parts.0", "blocks.0.parts.1"),
        "blocks.1.parts.0",
    )
