"""Repeats: what is known of a node is what would be seen of it, in programs of equal blocks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.cost.time_report import NodePrices, program_run_cost
from autopar.passes.flow import flow_of
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.program.equal_blocks import EqualBlocks
from autopar.states import BUFFER_BYTES
from autopar.strategies.node_info import info
from tests.annotations import megatron
from tests.models import Case, gpt
from tests.pipeline.models import MAKERS, share_captures  # noqa: F401
from tests.toy import EVEN, machines

MODELS = {
    "gpt": lambda: gpt(layers=12),
    "fused": lambda: gpt(layers=12, fused=True, tied=False),
    "megatron": lambda: megatron(gpt(layers=12)),
    **{name: lambda make=make: make(8, 12) for name, make in MAKERS.items()},
}
CUT = ap.Recompute("full", keep="cut")
WAYS = [
    ("whole", None, "data"),
    ("zero1", "selective", "propagate"),
    ("zero3", None, "auto"),
    ("zero3", "full", "propagate"),
    ("whole", CUT, "propagate"),
]
# Models take turns over the ways.
CASES = [
    (name, *way)
    for number, name in enumerate(MODELS)
    for turn, way in enumerate(WAYS)
    if (number + turn) % 2
]


@cache
def case_of(name: str) -> Case:
    return MODELS[name]()


def plan_of(case: Case, states: str, recompute: str | ap.Recompute | None, mode: str) -> ap.Plan:
    options = {"mesh": ap.Mesh(dp=2, tp=2), "cluster": machines(4, *EVEN), "mode": mode}
    options |= {"states": states, "recompute": recompute}
    return ap.plan(case.model, case.args, case.kwargs, **options)


@pytest.mark.parametrize(("name", "states", "recompute", "mode"), CASES)
def test_what_repeats_is_what_would_be_seen(
    name: str, states: str, recompute: str | ap.Recompute | None, mode: str
) -> None:
    plan = plan_of(case_of(name), states, recompute, mode)
    graph, mesh = plan.program.graph, plan.mesh
    repeats = EqualBlocks.of(graph)
    if name in ("gpt", "fused", "megatron") and recompute != CUT:
        assert len(repeats.twins) > len(graph.nodes) / 3
    prices = NodePrices(machines(4, *EVEN), mesh, BUFFER_BYTES)
    along, (once, each) = (
        prices.along(repeats),
        (SavedBytesCache(mesh, repeats), SavedBytesCache(mesh)),
    )
    for node in graph.nodes:
        assert along(node) == prices(node)
        assert once.own(node) == each.own(node)
        assert once.through(node) == each.through(node)
        assert once.remade(node) == each.remade(node)
    assert program_run_cost(graph, prices, repeats) == program_run_cost(graph, prices)


@pytest.mark.parametrize(("states", "recompute", "mode"), WAYS[1:4])
def test_a_line_of_what_repeats_is_that_of_all_nodes(
    states: str, recompute: str | ap.Recompute | None, mode: str
) -> None:
    plan = plan_of(case_of("fused"), states, recompute, mode)
    prices = NodePrices(machines(4, *EVEN), plan.mesh, BUFFER_BYTES)
    flow, other = (flow_of(plan.captured, plan.program.graph) for _ in range(2))
    vars(other)["equal_blocks"] = EqualBlocks()
    assert flow.equal_blocks.twins
    lines = [
        StageCosts(flow, plan.mesh, [prices.along(flow.equal_blocks)]),
        StageCosts(other, plan.mesh, [prices]),
    ]
    assert len({tuple(map(repr, line.stages([0, 20, 50, 90]))) for line in lines}) == 1
    points = (0, 20, 50, 90)
    one, each = (line.table(points) for line in lines)
    assert all((getattr(one, f) == getattr(each, f)).all() for f in vars(one))


class Uneven(nn.Module):
    """Layers that are equal but for one number."""

    def __init__(self, odd: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.nn.functional.leaky_relu(layer(x), 0.2 if number == self.odd else 0.1)
        return x.square().mean()


@pytest.mark.parametrize("odd", [None, 8])
def test_blocks_that_differ_are_none_of_a_run(odd: int | None) -> None:
    case = Case("uneven", Uneven(odd), (torch.randn(4, 8),))
    graph = plan_of(case, "whole", None, "propagate").program.graph
    modules = {info(node).module for node in EqualBlocks.of(graph).twins}
    assert ("layers.8" in modules) == (odd is None)
