"""Another program on the parameters of a pipeline, in the stages that hold these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar as ap
from autopar import Mesh
from autopar.capture import capture
from autopar.capture.listing import Listing
from autopar.passes.flow import Flow, copy_subgraph
from autopar.passes.restaging import cut_like
from autopar.pipeline.schedule import forward_only
from autopar.plans.plan import Plan
from autopar.plans.restaged import restage
from tests import models
from tests.models import Case, shared
from tests.pipeline.models import share_captures  # noqa: F401

ZB_V = {"mesh": Mesh(pp=2, dp=2), "microbatches": 2, "schedule": "zb-v"}
F1B1 = {"mesh": Mesh(pp=2), "microbatches": 4, "schedule": "1f1b"}


def planned(case: Case, **options) -> Plan:
    return ap.plan(case.model, case.args, case.kwargs, mode="propagate", **options)


@pytest.mark.parametrize(("name", "options"), [("gpt", ZB_V), ("resnet", F1B1)])
@pytest.mark.filterwarnings("ignore:batch norm")
def test_the_plans_own_program_has_the_stages_that_it_has(name, options):
    plan = planned(shared(name, layers=4) if name == "gpt" else shared(name), **options)
    program = replace(plan.program, pipelining=None, stages=())
    restaged, expected = restage(plan, program), plan.program
    assert restaged.schedule == expected.schedule
    assert [str(Listing(one.graph)) for one in restaged.stages] == [
        str(Listing(one.graph)) for one in expected.stages
    ]
    assert [(s.receives, s.sends, s.outputs, s.loss, s.statistics) for s in restaged.stages] == [
        (s.receives, s.sends, s.outputs, s.loss, s.statistics) for s in expected.stages
    ]


def test_calls_of_other_names_lie_where_what_they_read_is_held():
    plan = planned(shared("gpt", layers=4), **ZB_V)
    like = plan.cut(plan.pipelining)
    graph = copy_subgraph(plan.program.graph, plan.program.graph.nodes)
    for node in graph.nodes:
        if node.op == "call_function":
            node.name = f"other_{node.name}"
    cut = cut_like(Flow(graph, like.flow.mutations), like)
    held = {node.name: stages for node, stages in like.stages.items()}
    for node, places in cut.flow.held_at.items():
        assert {cut.stage_at(place) for place in places} <= set(held[node.name])
    assert cut.count == like.count


@pytest.mark.parametrize(("name", "options"), [("gpt", ZB_V), ("resnet", F1B1)])
@pytest.mark.filterwarnings("ignore:batch norm")
def test_evaluation_of_another_batch_goes_through_the_same_stages(name, options):
    case = models.gpt(layers=4, dropout=0.1) if name == "gpt" else models.resnet()
    module = ap.parallelize(case.model, plan=planned(case, **options), backend="virtual")
    module.step(*case.args, **case.kwargs)
    alone = case.model.eval()
    alone.load_state_dict(module.full_state_dict())
    size = 6
    args, kwargs = pytree.tree_map(lambda x: torch.cat([x, x])[:size], (case.args, case.kwargs))
    captured = capture(alone, args, kwargs)
    program = module.plan.forward_program(captured, 3)
    backend = module.backend.with_same_copies(program)
    with torch.no_grad():
        inputs = program.bind(args, kwargs, program.whole_shapes)
        found = program.structure(backend.call(module._current_tensors(), inputs))
        torch.testing.assert_close(found, alone(*args, **kwargs), rtol=1e-12, atol=1e-12)
    assert program.schedule.microbatches == 3


def test_a_program_that_goes_back_is_refused():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.is_turned = False

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.other, self.one) if self.is_turned else (self.one, self.other)
            return second(torch.tanh(first(x))).square().mean()

    model, x = Twice(), torch.randn(4, 4)
    plan = ap.plan(model, (x,), mode="propagate", mesh=Mesh(pp=2), microbatches=2)
    model.is_turned = True
    with pytest.raises(ap.InvalidInput, match="once, in their order") as caught:
        plan.forward_program(capture(model, (x,), {}), 2)
    assert "one.weight is held by stage 0" in caught.value.got


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("placement", [((0, 1),), ((0, 1, 1, 0),), ((0, 1, 2), (2, 1, 0))])
def test_every_micro_batch_goes_through_every_stage_once(placement, microbatches):
    """Ranks may share one list in any order of turns: stages of a micro-batch follow each other."""
    made = forward_only(placement, microbatches)
    waiting, done = [list(order) for order in made.orders], set()
    while any(waiting):
        before = len(done)
        for order in waiting:
            while order:
                one = order[0]
                if one.stage and (one.stage - 1, one.microbatches) not in done:
                    break
                done.add((one.stage, order.pop(0).microbatches))
        assert len(done) > before
    assert len(done) == microbatches * len(placement[0])
