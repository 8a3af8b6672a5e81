"""One price for every node: a line, a program and a step are sums of it, and none is too good."""

from __future__ import annotations

from functools import cache

import pytest

import autopar as ap
from autopar.search.flow import flow_of
from autopar.search.report import NodePrices
from autopar.search.stages import COLUMNS, Line
from tests.models import ZOO, Case
from tests.pipeline.models import MAKERS, share_captures  # noqa: F401
from tests.toy import EVEN, FAST, SLOW, machines

MODELS = {
    **ZOO,
    "gpt-fused": lambda: ZOO["gpt"](fused=True, tied=False),
    **{f"deep-{name}": lambda make=make: make(8, 2) for name, make in MAKERS.items()},
}
WAYS = [
    ("auto", ap.Mesh(a=2, b=2), EVEN),
    ("auto", ap.Mesh(a=4), FAST),
    ("propagate", ap.Mesh(dp=2, tp=2), SLOW),
]
# A running mean whose channels are cut has no place on a line: a pipeline refuses to read it.
CASES = [(n, *way) for n in MODELS for way in WAYS if way[0] != "auto" or "res" not in n]


@cache
def case_of(name: str) -> Case:
    return MODELS[name]()


@pytest.mark.parametrize(("name", "mode", "mesh", "links"), CASES, ids=str)
def test_the_nodes_of_a_line_cost_what_the_program_costs(name, mode, mesh, links) -> None:
    case, cluster = case_of(name), machines(mesh.size, *links)
    options = {"mode": mode, "mesh": mesh, "cluster": cluster, "microbatches": 2}
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    prices = NodePrices(cluster, mesh)
    line = Line(flow_of(plan.captured, plan.program.graph), mesh, prices, 1e9)
    whole = line.sums([0, len(line.flow.activations)])[0, 1]
    found = dict(zip(COLUMNS, whole.tolist()))
    cost = plan.cost
    once = cost.compute + cost.communication - cost.gradient_sync
    assert found["forward"] + found["backward"] == pytest.approx(once / 2)
    assert found["summed"] == pytest.approx(cost.gradient_sync)
    assert found["parameters"] == plan.memory.parameters
