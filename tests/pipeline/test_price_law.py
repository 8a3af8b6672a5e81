"""One price for every node: a line, a program and a step are sums of it, and none is too good."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.cluster import Link, Node
from autopar.cost.time_report import NodePrices
from autopar.passes.flow import flow_of
from autopar.pipeline.stages.stage_cost import COLUMNS
from autopar.pipeline.stages.stage_tables import StageCosts
from autopar.report.step_parts import step_parts as told
from autopar.states import BUFFER_BYTES
from tests.annotations import megatron
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
# Models take turns over the ways, two each.
# A running mean whose channels are cut has no place on a line: a pipeline refuses to read it.
CASES = [
    (name, *way)
    for number, name in enumerate(MODELS)
    for turn, way in enumerate(WAYS)
    if (way[0] != "auto" and "res" in name) or ("res" not in name and (number + turn) % 3)
]


@cache
def case_of(name: str) -> Case:
    return MODELS[name]()


@pytest.mark.parametrize(("name", "mode", "mesh", "links"), CASES, ids=str)
def test_the_nodes_of_a_line_cost_what_the_program_costs(name, mode, mesh, links) -> None:
    case, cluster = case_of(name), machines(mesh.size, *links)
    options = {"mode": mode, "mesh": mesh, "cluster": cluster, "microbatches": 2}
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    prices = NodePrices(cluster, mesh, BUFFER_BYTES)
    line = StageCosts(flow_of(plan.captured, plan.program.graph), mesh, [prices])
    whole = line.sums([0, len(line.flow.activations)])[0, 1]
    found = dict(zip(COLUMNS, whole.tolist()))
    cost = plan.cost
    assert found["forward"] + found["backward"] == pytest.approx((cost.compute + cost.shown) / 2)
    assert found["summed"] == pytest.approx(cost.gradient_sync)
    assert found["gathering"] == pytest.approx(cost.gathered)
    memory = plan.memory
    held = found["parameters"], found["gradients"], found["buffers"]
    assert held == (memory.parameters, memory.gradients, memory.buffers)


THERE = ap.States(optimizer_device="host")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("precision", [None, ap.Precision()])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("states", ["whole", "zero1", THERE, replace(THERE, optimizer="all")])
def test_a_pipeline_names_the_parts_of_a_step(states, dp, precision, schedule) -> None:
    """Those of a step without one, whatever is done once a step."""
    case = ZOO["gpt"](layers=4, tied=False)
    options = {"mode": "data", "states": states, "precision": precision, "microbatches": 2}
    options["cluster"] = ap.Cluster.preset("dgx-a100")
    plain = ap.plan(case.model, case.args, mesh=ap.Mesh(dp=dp), **options)
    mesh = ap.Mesh(pp=2, dp=dp)
    staged = ap.plan(case.model, case.args, mesh=mesh, schedule=schedule, **options)
    found, own = (
        {name for name, size in plan.cost.parts.items() if size} for plan in (plain, staged)
    )
    assert own - {"bubble"} == found
    assert ("host" in own) == (states not in ("whole", "zero1"))
    assert 0 <= staged.cost.updated <= plain.cost.updated
    for part in ("gathered", "gradient_sync"):
        assert getattr(staged.cost, part) == pytest.approx(getattr(plain.cost, part))
    for cost in (plain.cost, staged.cost):
        assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
    assert staged.cost.seconds == pytest.approx(staged.seconds)
    words = (
        ", host " in " ".join(str(staged).split()),
        "updates on the host" in {one.name for one in told(staged)},
    )
    assert words == ("host" in own,) * 2


@pytest.mark.parametrize("states", ["whole", "zero3"])
def test_what_travels_in_smaller_buffers_shares_less_latency(states: str) -> None:
    case, cluster = case_of("gpt"), machines(2)
    moved = []
    for size in (BUFFER_BYTES, 1 << 10):
        asked = replace(ap.States.of(states), buffer_bytes=size)
        options = {"mode": "data", "mesh": ap.Mesh(dp=2), "cluster": cluster, "states": asked}
        plan = ap.plan(case.model, case.args, case.kwargs, **options)
        assert plan.states.buffer_bytes == size
        moved.append(plan.cost.communication)
    assert moved[0] < moved[1]


@pytest.mark.parametrize("links", [EVEN, SLOW])
@pytest.mark.parametrize("states", ["whole", "zero3"])
def test_the_search_hides_what_the_program_hides(states: str, links: tuple[float, float]) -> None:
    case, cluster = case_of("gpt-fused"), machines(4, *links)
    options = {"mode": "auto", "mesh": ap.Mesh(a=2, b=2), "cluster": cluster, "states": states}
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    assert plan.search is not None
    assert plan.search.added_up == pytest.approx(plan.cost.seconds, rel=1e-6)
    assert plan.cost.exposed < plan.cost.communication


def test_what_is_hidden_is_bounded_by_what_is_computed() -> None:
    """And by how fast computing goes beside it."""
    case = megatron(ZOO["gpt"]())
    options = {"mode": "propagate", "mesh": ap.Mesh(dp=2, tp=2)}
    for bandwidth, overlap in itertools.product((1e10, 1e7), (0.0, 0.5, 1.0)):
        (node,) = (cluster := machines(4, bandwidth)).nodes
        device = replace(node.device, overlap=overlap)
        cluster = replace(cluster, nodes=(replace(node, device=device),))
        plan = ap.plan(case.model, case.args, case.kwargs, cluster=cluster, **options)
        cost, prices = plan.cost, NodePrices(cluster, plan.mesh, BUFFER_BYTES)
        hidden = cost.communication - cost.exposed
        assert hidden <= min(overlap * cost.communication, cost.compute) * (1 + 1e-9)
        assert (hidden == 0) == (overlap == 0)
        for node in plan.program.graph.nodes:
            if node.name.startswith("identity"):
                price = prices(node)
                weights = sum(prices(reader).backward / 2 for reader in node.users)
                expected = min(overlap * (price.backward + price.hidden), weights)
                assert price.hidden == pytest.approx(expected, rel=0.1)  # biases add a little


class Linears(nn.Module):
    """Layers of several widths, one of them read twice, and a loss."""

    def __init__(self, widths: list[int], bias: bool) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*[nn.Linear(m, n, bias=bias) for m, n in pairs])
        self.twice = nn.Linear(widths[-1], widths[-1], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return self.twice(self.twice(x).relu()).square().mean()


def flops_of(model: nn.Module, x: Tensor) -> int:
    """Of the linears of a step: the product, and one for each gradient."""
    total = 0

    def count(linear: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        passes = 3 if inputs[0].requires_grad else 2
        total += passes * 2 * output.numel() * linear.in_features

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Linear)]
    model(x)
    for hook in hooks:
        hook.remove()
    return total


PIPELINES = ("gpipe", "1f1b", "zb-h1", "interleaved", "chimera")


@pytest.mark.parametrize("seed", range(1, 6))
def test_nothing_is_predicted_faster_than_its_flops(seed: int) -> None:
    """Of random sizes and ways, micro-batches of one and two rows among them."""
    draw = random.Random(seed)
    microbatches = draw.choice([1, 2, 4])
    rows = draw.choice([1, 2, 3]) * microbatches
    widths = [draw.choice([1, 7, 96, 160]) for _ in range(draw.randint(3, 5))]
    model, x = Linears(widths, draw.random() < 0.5), torch.randn(rows, widths[0])
    flops, cluster = flops_of(model, x), machines(2, *draw.choice([FAST, EVEN, SLOW]))
    many = {"microbatches": microbatches}
    ways: list[dict] = [
        {},
        {"mode": "auto", "mesh": ap.Mesh(a=2), **many},
        {"mode": "propagate", "mesh": ap.Mesh(dp=1), **many},
        {"mode": "data", "mesh": ap.Mesh(dp=2)},
        {"mode": "propagate", "mesh": ap.Mesh(pp=2), "schedule": draw.choice(PIPELINES)}
        | {"microbatches": max(2, microbatches)},
    ]
    told = 0
    for way in ways:
        try:
            plan = ap.plan(model, (x,), cluster=cluster, progress=False, **way)
        except ap.AutoparError:  # a pipeline wants layers, and rows for its micro-batches
            continue
        told += 1
        devices = way["mesh"].size if "mesh" in way else 2
        seconds = [plan.cost.seconds, *(one.seconds for one in plan.alternatives)]
        assert min(seconds) >= flops / (1e9 * devices) * (1 - 1e-9), way
    assert told >= 2


def _on(*links: Link, overlap: float = 0.84) -> ap.Cluster:
    """Nodes of two devices, with these links inside."""
    device = replace(ap.Cluster.preset("dgx-a100").device, overlap=overlap)
    return ap.Cluster(tuple(Node(device, 2, link) for link in links), Link(5e-6, 3e9), "nodes")


FASTER, SLOWER = Link(5e-6, 300e9), Link(5e-6, 30e9)


@pytest.mark.parametrize("links", [(FASTER, FASTER), (FASTER, SLOWER)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "chimera"])
def test_what_a_split_backward_shows_is_no_more_than_what_was_hidden(schedule, links) -> None:
    """Also where stages stand on unlike machines, each of which hides another part."""
    case = megatron(ZOO["gpt"](layers=4, tied=False))
    options = {"mesh": ap.Mesh(pp=2, tp=2), "microbatches": 4, "mode": "propagate"}
    plan = ap.plan(
        case.model, case.args, case.kwargs, cluster=_on(*links), schedule=schedule, **options
    )
    cost = plan.cost
    assert cost.hidden >= 0
    assert 0 <= cost.exposed <= cost.communication * (1 + 1e-9)
    assert cost.hidden == 0 or schedule in ("1f1b", "chimera")
    assert sum(cost.parts.values()) == pytest.approx(cost.seconds)


@pytest.mark.parametrize("states", ["whole", "zero1", THERE])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_stages_that_share_parameters_are_no_faster(states, overlap) -> None:
    """And where computing hides all, nothing that is left is below zero."""
    options = {"mode": "data", "mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 4}
    found = []
    for tied in (False, True):
        case, cluster = ZOO["gpt"](layers=4, tied=tied), _on(FASTER, FASTER, overlap=overlap)
        plan = ap.plan(case.model, case.args, cluster=cluster, states=states, **options)
        found.append(plan.seconds)
    assert found[0] <= found[1]
