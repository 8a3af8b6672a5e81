"""The choice of a pipeline: by simulation, within memory, exact when it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import autopar as ap
from autopar.base.schema import write
from autopar.candidates.staged import StagedProgram, StagedWay
from autopar.cluster import Device, Link, Node
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.compute_lower_bound import least_time
from autopar.planner.loop import Planner
from autopar.planner.question import Question
from autopar.planner.record import Record
from autopar.planner.rules import SIMPLER
from autopar.recompute import Recompute
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity
from tests.pipeline.models import share_captures  # noqa: F401


def slow_network(nodes: int, memory: float = 1e9) -> ap.Cluster:
    """Nodes of one device each, far apart: what crosses them had better be small."""
    device = Device(
        "toy",
        {"f32": 1e9, "f64": 1e9},
        memory,
        4e9,
        overhead=0,
        efficiency=1.0,
        bandwidth_efficiency=1.0,
    )
    return ap.Cluster((Node(device, 1, Link(1e-7, 1e9)),) * nodes, Link(1e-5, 1e7), "toy")


def plan(case: models.Case, cluster: ap.Cluster, **options: object) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, cluster=cluster, mode="auto", **options)


def fastest(chosen: ap.Plan) -> float:
    """The seconds of the fastest way that was found, which keeps nothing on a host if one does."""
    fitting = [one for one in chosen.alternatives if one.fits]
    ways = [one for one in fitting if not one.states.is_on_host and "host" not in one.recompute]
    return min(one.seconds for one in ways or fitting)


@cache
def of_two_stages() -> ap.Plan:
    return plan(models.shared("gpt"), slow_network(2))


def test_over_a_slow_network_stages_beat_cut_operators() -> None:
    chosen = of_two_stages()
    assert chosen.pipelining is not None
    whole = plan(models.shared("gpt"), slow_network(2), pipeline=None)
    assert chosen.cost.seconds < whole.cost.seconds


def test_every_alternative_is_kept_and_the_fastest_that_fits_is_taken() -> None:
    chosen = of_two_stages()
    fastest = min(a.seconds for a in chosen.alternatives if a.fits)
    assert fastest <= chosen.cost.seconds <= 1.01 * fastest
    assert {a.schedule for a in chosen.alternatives} >= {"1f1b", "chimera"}
    assert all(a.memory > 0 and write(a)["seconds"] > 0 for a in chosen.alternatives)


def test_a_schedule_is_chosen_for_the_users_mesh() -> None:
    chosen = plan(models.shared("gpt"), slow_network(4), mesh=ap.Mesh(pp=2, dp=2), microbatches=4)
    assert chosen.pipelining is not None
    assert chosen.pipelining.mesh == ap.Mesh(pp=2, dp=2)
    assert chosen.microbatches == 4
    assert {a.microbatches for a in chosen.alternatives} == {4}


def test_the_axis_of_a_pipeline_is_called_as_the_user_says() -> None:
    """And its mesh is the user's, where one is given, with the order of its axes."""
    case = models.shared("gpt")
    module = ap.parallelize(
        case.model,
        case.args,
        cluster=slow_network(4),
        mesh=ap.Mesh(data=2, deep=2),
        pipeline="deep",
        backend="virtual",
        microbatches=4,
    )
    assert module.plan.whole_mesh == ap.Mesh(data=2, deep=2)
    assert module.plan.pipelining.axis == "deep"
    named = plan(case, slow_network(2), pipeline="deep")
    assert named.pipelining.axis == named.whole_mesh.names[0] == "deep"
    assert_parity(case, ap.Mesh(data=2, deep=2), pipeline="deep", microbatches=4, mode="auto")


def test_the_chosen_pipeline_is_exact() -> None:
    case = models.shared("gpt")
    module = ap.parallelize(
        case.model, case.args, case.kwargs, plan=of_two_stages(), backend="virtual"
    )
    assert module.plan.pipelining is not None
    reference = case.fresh()
    loss = reference.loss(reference.run())
    loss.backward()
    assert torch.allclose(module.step(*case.args, **case.kwargs), loss, rtol=1e-9, atol=0)
    gradients = module.full_grads()
    for name, parameter in reference.model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12), name


def test_on_one_node_a_batch_in_turns_comes_before_stages_and_before_running_again() -> None:
    """Nobody waits and nothing runs twice, where links are fast, and the way to a host is as slow
    beside a device's own memory as it is on machines."""
    device = slow_network(1).nodes[0].device
    host = replace(device.host, copy_bandwidth=device.bandwidth / 80)
    node = Node(replace(device, host=host), 4, Link(1e-6, 1e9))
    case = models.gpt(batch=8, fused=True)
    options = {"cluster": ap.Cluster((node,), node.link, "toy"), "states": "whole"}
    memory = 0.85 * plan(case, **options).memory.peak
    chosen = plan(case, memory=memory, **options)
    assert chosen.pipelining is None
    assert chosen.microbatches > 1
    assert not chosen.decisions.recompute
    for named in {"pipeline": 2}, {"pipeline": None, "microbatches": 1}:
        other = plan(case, memory=memory, **options, **named)
        assert chosen.cost.seconds < other.cost.seconds * (1 + SIMPLER), named


@pytest.mark.parametrize("options", [{}, {"mesh": ap.Mesh(pp=2), "schedule": "1f1b"}], ids=str)
def test_memory_that_nothing_meets_is_answered_with_the_least(options) -> None:
    with pytest.raises(ap.InvalidInput, match="least"):
        plan(models.shared("mlp"), slow_network(2), memory=1e3, **options)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ((6, 6), {"pipeline": 3, "microbatches": 3}),
        ((3, 3), {}),
        ((4, 8), {"pipeline": 2, "microbatches": 2}),
        ((5, 3), {"mesh": ap.Mesh(x=8)}),
    ],
)
def test_nodes_that_no_mesh_respects_are_planned_all_the_same(devices, options) -> None:
    """Then an axis straddles the border of a node, and pays for it."""
    toy = slow_network(1).nodes[0]
    nodes = tuple(Node(toy.device, count, toy.link) for count in devices)
    cluster = ap.Cluster(nodes, Link(1e-5, 1e7), "toy")
    chosen = plan(models.mlp(batch=2 * sum(devices)), cluster, **options)
    assert sum(devices) in [one.mesh.size for one in chosen.alternatives]
    assert chosen.whole_mesh.size == chosen.cluster.devices
    assert chosen.search.bound <= chosen.cost.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "layers", "devices", "share"), [("gpt", 1, 2, 1.0), ("mlp", 2, 4, 0.6)]
)
def test_in_whatever_order_questions_are_asked_the_choice_takes_as_long(
    name, layers, devices, share, monkeypatch
) -> None:
    """What is asked first only lets more of the others be left out."""
    case, cluster = models.shared(name, layers=layers, batch=8), slow_network(devices)
    free = plan(case, cluster, seconds=None)
    memory = share * free.memory.peak
    own = free if share == 1 else plan(case, cluster, memory=memory, seconds=None)
    assert own.memory.peak <= memory
    for sign in (1, -1):

        def order(planner: Planner, question: Question, sign: int = sign) -> float:
            return (question.stages + question.microbatches / 1e3) ** sign

        monkeypatch.setattr(Planner, "_order", order)
        other = plan(case, cluster, memory=memory, seconds=None)
        assert fastest(other) == pytest.approx(fastest(own), rel=1e-6), sign
        assert other.cost.seconds <= 1.01 * fastest(own), sign
        assert other.memory.peak <= memory


@pytest.mark.parametrize(
    ("name", "layers", "devices", "share", "options"),
    [
        ("gpt", 2, 2, 1.0, {}),
        ("mlp", 2, 4, 0.6, {"microbatches": 2, "states": "whole"}),
        ("mlp", 3, 4, 0.6, {"pipeline": None}),
        ("vit", 1, 2, 0.7, {"states": "whole"}),
    ],
)
def test_what_bounds_leave_out_is_not_faster(
    name, layers, devices, share, options, monkeypatch
) -> None:
    """Every question is answered to its end, and with bounds; also where states are cut, and where
    regions run again."""
    device = replace(slow_network(1).nodes[0].device, overhead=2e-5)
    node = Node(device, devices, Link(1e-6, 1e8))
    case = models.shared(name, layers=layers, batch=4)
    cluster = ap.Cluster((node,), node.link, "toy")
    memory = share * plan(case, cluster, seconds=None, **options).memory.peak

    def found() -> ap.Plan:
        return plan(case, cluster, memory=memory, seconds=None, **options)

    bounded = found()
    assert bounded.left_out or any("takes at least" in step.answer for step in bounded.asked)
    monkeypatch.setattr(Planner, "_bound", lambda *_: 0.0)
    monkeypatch.setattr(Record, "cutoff", lambda *_: math.inf)
    whole = found()
    assert not whole.left_out
    assert len(whole.alternatives) >= len(bounded.alternatives)
    assert fastest(bounded) == pytest.approx(fastest(whole), rel=1e-6)
    assert bounded.cost.seconds <= 1.01 * fastest(whole)
    assert bounded.memory.peak <= memory


class Loss(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("half", [False, True])
def test_no_stages_are_faster_than_the_bound_of_their_program(half, monkeypatch) -> None:
    """Casts of large weights, which are made once a step, are no part of each micro-batch."""
    sizes = [16384, 32768, 1024, 1024, 32768, 16384]
    with torch.device("meta"):
        model = Loss(*(torch.nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
        x = torch.empty(256, 16384)
    told: list[tuple[float, float, str]] = []

    kept = StagedProgram.fastest

    def fastest(self: StagedProgram, made: Schedule, kind: Recompute) -> StagedWay:
        way = kept(self, made, kind)
        if kind.is_plain:
            work, moves = self.laid.run.worked, self.laid.run.moved
            once = work.forward + work.backward + moves.forward + moves.backward
            bound = least_time(made) * once
            told.append((bound, way.seconds, made.name))
        return way

    monkeypatch.setattr(StagedProgram, "fastest", fastest)
    options = {"precision": ap.Precision(compute=torch.bfloat16)} if half else {}
    cluster = ap.Cluster.preset("dgx-a100")
    ap.plan(model, (x,), cluster=cluster, mesh=ap.Mesh(pp=2), microbatches=4, **options)
    assert len(told) > 3
    for bound, seconds, name in told:
        assert bound <= seconds * (1 + 1e-9), name


@cache
def deep() -> models.Case:
    return models.gpt(layers=4, batch=16, sequence=16)


@pytest.mark.parametrize(
    ("mesh", "share", "again"),
    [
        ({"pp": 4}, 1.005, False),  # another schedule
        ({"pp": 4}, 0.7, True),  # blocks recompute
        ({"pp": 2, "dp": 2}, 0.5, True),  # and their layouts are leaner
    ],
)
def test_less_memory_takes_other_cuts_recomputation_and_leaner_layouts(mesh, share, again) -> None:
    options = {"mesh": ap.Mesh(**mesh), "microbatches": 8}
    free = plan(deep(), slow_network(4), **options)
    limit = share * min(one.memory for one in free.alternatives)
    tight = plan(deep(), slow_network(4), memory=limit, **options)
    assert tight.memory.peak <= limit
    assert bool(tight.decisions.recompute) == again
    assert tight.cost.seconds <= fastest(tight) * (1 + SIMPLER)
    taken = tight.alternative(limit)
    assert bool(taken.recompute) == again
    assert ("recomputed" in str(taken)) == again


def test_pieces_are_kept_before_all_runs_again_where_ranks_keep_alike() -> None:
    """They are gathered again in less time, and leave as much room, where layouts are given."""
    case = megatron(models.gpt(layers=4, batch=8, sequence=64, hidden=32, heads=4))
    mesh, cluster = ap.Mesh(pp=2, tp=4), ap.Cluster.preset("dgx-h100", 1)
    options = {"mode": "propagate", "microbatches": 4, "schedule": "1f1b", "states": "whole"}

    def planned(**more: object) -> ap.Plan:
        return ap.plan(case.model, case.args, mesh=mesh, cluster=cluster, **options, **more)

    ways = ("selective", "full", ap.Recompute("selective", "cut"))
    some, every, pieces = (planned(recompute=how) for how in ways)
    limit = 1.001 * pieces.memory.peak
    assert some.memory.peak > limit > every.memory.peak
    chosen = planned(memory=limit)
    assert {one.keep for one in chosen.decisions.recompute.values()} == {"cut"}
    assert chosen.cost.seconds <= pieces.cost.seconds * (1 + 1e-9)
    assert pieces.cost.seconds < every.cost.seconds
    assert_parity(case, mesh, memory=limit, cluster=cluster, **options)


def test_a_choice_that_recomputes_is_exact_and_can_be_saved(tmp_path) -> None:
    limit = {"memory": 1.2e6, "cluster": slow_network(2), "microbatches": 8, "states": "whole"}
    chosen = plan(deep(), mesh=ap.Mesh(pp=2), **limit)
    assert chosen.decisions.recompute
    chosen.save(tmp_path / "plan.json")
    loaded = ap.Plan.load(tmp_path / "plan.json")
    assert loaded.alternatives == chosen.alternatives
    assert_parity(deep(), ap.Mesh(pp=2), mode="auto", **limit)


def test_more_stages_than_layers_are_refused_before_anything_runs() -> None:
    """Whatever the schedule and the micro-batches are: the rule is the one of stages."""
    with pytest.raises(ap.InvalidInput, match="stages") as error:
        plan(models.shared("gpt"), slow_network(8), mesh=ap.Mesh(pp=8))
    assert error.value.rule == "a pipeline has at most as many stages as the model has layers"
    assert error.value.got == "8 stages for 2 layers"


@cache
def heavy_ends() -> models.Case:
    return models.gpt(layers=12, hidden=16, heads=2, vocabulary=600, tied=False)


@pytest.mark.parametrize(
    ("mode", "schedule", "ranks", "share"),
    [
        ("propagate", "1f1b", 2, 0.95),
        ("propagate", "zb-v", 2, 0.95),
        ("propagate", "chimera", 4, 0.995),  # both ends share a rank: no cut takes below 0.99
        ("auto", "chimera", 4, 0.995),
    ],
)
def test_stages_are_cut_so_that_every_rank_keeps_within_memory(
    mode, schedule, ranks, share
) -> None:
    """An embedding takes much memory and little time: the fastest cut fills its rank."""
    case = heavy_ends()
    options = {
        "cluster": slow_network(ranks),
        "mode": mode,
        "mesh": ap.Mesh(pp=ranks),
        "schedule": schedule,
        "microbatches": 4,
    }
    free = ap.plan(case.model, case.args, **options)
    limit = free.memory.peak * share
    tight = ap.plan(case.model, case.args, memory=limit, **options)
    assert tight.memory.peak <= limit
    assert tight.pipelining.stages != free.pipelining.stages
    slowest = []
    for plan in (free, tight):
        hardware = plan.stage_hardware(plan.pipelining.schedule.placement, limit)
        both = zip(plan.pipelining.stages, hardware)
        slowest.append(max(s.seconds + 2 * s.receives / at.bandwidth for s, at in both))
    assert slowest[0] <= slowest[1]
