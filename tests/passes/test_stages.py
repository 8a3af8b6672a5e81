"""Where stages begin, what users may pin, and what crosses."""

from __future__ import annotations

import itertools
import re

import pytest
from torch import nn

import autopar as ap
from autopar.cost.state_price import NodeCost
from autopar.passes.flow import flow_of
from autopar.pipeline.stages.cut import choose_stages
from autopar.pipeline.stages.stage_cost import imbalance
from autopar.pipeline.stages.stage_hardware import StageHardware
from autopar.pipeline.stages.stage_tables import StageCosts
from tests.models import gpt, mlp, resnet


@pytest.fixture(scope="module")
def plan():
    case = gpt(layers=4, batch=4)
    return ap.plan(
        case.model, case.args, case.kwargs, mode="propagate", mesh=ap.Mesh(dp=1), microbatches=2
    )


def cut(plan, count, cost=None, link_bandwidth=25e9, **options):
    flow = flow_of(plan.captured, plan.program.graph)
    cost = cost or plan.prices
    hardware = [StageHardware(bandwidth=link_bandwidth)] * count
    costs = StageCosts(flow, plan.mesh, [cost])
    return choose_stages(costs, count, hardware=hardware, **options)


def test_stages_begin_at_layers(plan):
    modules = [stage.module for stage in cut(plan, 4)]
    assert modules == ["tokens", *(f"layers.{i}.norm1" for i in (1, 2, 3))]


def test_the_slowest_stage_is_as_fast_as_can_be(plan):
    weights = {"layers.0": 1.0, "layers.1": 5.0, "layers.2": 1.0, "layers.3": 1.0}
    seen: set[str] = set()

    def cost(node):
        layer = re.match(r"layers\.\d", node.meta["module"])
        if layer is None or layer.group() in seen:
            return NodeCost()
        seen.add(layer.group())
        return NodeCost(weights[layer.group()])

    stages = cut(plan, 2, cost=cost, link_bandwidth=1e30)
    best = min(
        max(sum(list(weights.values())[:place]), sum(list(weights.values())[place:]))
        for place in range(5)
    )
    assert max(stage.seconds for stage in stages) == best
    assert imbalance(stages) == pytest.approx(2 * best / 8 - 1)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_each_stage_holds_a_parameter_though_others_would_be_faster(count):
    case = mlp(layers=5)
    plan = ap.plan(case.model, case.args, mode="propagate", mesh=ap.Mesh(dp=1))
    stages = cut(plan, count, cost=lambda node: NodeCost("relu" in node.name), link_bandwidth=1e30)
    assert all(stage.parameters for stage in stages)


def test_a_memory_limit_is_kept_or_refused(plan):
    free = cut(plan, 2)
    most = max(4 * stage.parameters + 2 * stage.activations for stage in free)
    tight = cut(plan, 2, memory=most, peaks=[{0: (2, 0, 0)}, {1: (2, 0, 0)}])
    assert all(4 * s.parameters + 2 * s.activations <= most for s in tight)
    with pytest.raises(ap.InvalidInput, match="so that the stages fit"):
        cut(plan, 2, memory=1000.0, peaks=[{0: (2, 0, 0)}, {1: (2, 0, 0)}])


def pinned(pins, stages=2, case=None):
    case = case or gpt(layers=4, batch=4)
    modules = dict(case.model.named_modules())
    for path, stage in pins:
        ap.shard(modules[path], stage=stage)
    return ap.plan(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=stages),
        microbatches=2,
    ).pipelining


def test_pinned_modules_start_stages():
    stages = pinned([("layers.1", 1), ("layers.3", 2)], stages=3).stages
    assert [stage.module for stage in stages] == ["tokens", "layers.1.norm1", "layers.3.norm1"]
    assert pinned([("layers.3", 1)]).stages[1].module == "layers.3.norm1"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([("layers.1.down", 1)], "inside a residual"),
        ([("layers.1.attention", 1)], "inside a residual"),
        ([("layers.1.attention.k", 1)], "inside a residual"),
        ([("layers.3", 1), ("layers.1", 2)], "does not come after"),
        ([("layers.3", 1), ("layers.1", 1)], "starts at"),
        ([("layers.3", 5)], "stage 5 of 3"),
        ([("layers.3", 0)], "stage 0 begins with the model"),
        ([("dropout", 1)], "does nothing on the way to the loss"),
    ],
)
def test_bad_pins_are_refused(pins, message):
    with pytest.raises(ap.InvalidInput, match=message) as caught:
        pinned(pins, stages=3)
    assert "test_stages.py" in caught.value.source


def test_a_pin_inside_a_residual_block_of_a_resnet():
    with pytest.raises(ap.InvalidInput, match="inside a residual"):
        pinned([("blocks.1.convolutions.1", 1)], case=resnet())


def test_a_module_starts_one_stage():
    layer = nn.Linear(2, 2)
    ap.shard(layer, stage=1)
    with pytest.raises(ap.InvalidInput, match="a module starts one stage"):
        ap.shard(layer, stage=2)
    with pytest.raises(ap.InvalidInput, match="number of the stage"):
        ap.shard(layer, stage=-1)


def test_programs_of_stages():
    case = gpt(layers=2, batch=4)
    plan = ap.plan(
        case.model, case.args, case.kwargs, mode="propagate", mesh=ap.Mesh(pp=2), microbatches=2
    )
    first, last = plan.program.stages
    assert first.sends == last.receives
    assert (first.outputs, first.loss, last.outputs, last.loss) == ((), None, (0,), 0)
    assert "tokens.weight" in first.holds("parameter")
    assert "tokens.weight" in last.holds("parameter")
    for one, other in itertools.pairwise(plan.program.stages):
        shared = set(one.holds("parameter")) & set(other.holds("parameter"))
        assert shared == {"tokens.weight"}
    # Labels are shifted where they are read, and not sent.
    assert "labels" in {node.name for node in last.graph.nodes}


def test_what_a_stage_is_given_moves_no_more():
    case = resnet()
    options = {"mode": "propagate", "mesh": ap.Mesh(pp=2, dp=2), "microbatches": 2}
    stages = ap.plan(case.model, case.args, case.kwargs, **options).program.stages
    graphs = [graph for stage in stages for graph in (stage.graph, stage.update)]
    given = [node for graph in graphs for node in graph.nodes if node.op == "placeholder"]
    assert {name for stage in stages for name in stage.statistics}
    assert not [node for node in given if "movement" in node.meta]
