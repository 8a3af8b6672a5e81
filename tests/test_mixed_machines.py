"""Mixed machines: nodes of unlike devices and uneven counts, planned by what each can do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import autopar as ap
from autopar.candidates.candidate import Candidate
from autopar.capture import capture
from autopar.cluster import Device, Link, Node
from autopar.mesh import meshes
from autopar.options import PlanOptions, read_request
from autopar.pipeline.schedules import weighed_schedules
from autopar.planner import loop
from autopar.planner.loop import Planner
from autopar.planner.offers import offers
from autopar.planner.question import Question, ScheduleName
from autopar.search.layout_search import nothing_found_yet
from tests.models import Case, gpt, mlp
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import share_captures  # noqa: F401

SLOW = Device("slow", {"f32": 1e9, "f64": 1e9}, 1e9, 4e9, overhead=0.0, efficiency=1.0)
FAST = replace(SLOW, name="fast", flops={"f32": 3e9, "f64": 3e9}, bandwidth=12e9)
SLOWEST = replace(SLOW, name="slowest", flops={"f32": 1e7, "f64": 1e7}, bandwidth=4e7)


def cluster(*nodes: tuple[Device, int], network: float = 1e8) -> ap.Cluster:
    link = Link(1e-7, 1e9)
    return ap.Cluster(tuple(Node(*node, link) for node in nodes), Link(1e-6, network), "mixed")


UNEVEN = {
    "6 and 6": cluster((FAST, 6), (FAST, 6)),
    "3 and 3": cluster((FAST, 3), (FAST, 3)),
    "4 and 8": cluster((FAST, 4), (FAST, 8)),
    "3 and 8": cluster((SLOW, 3), (FAST, 8)),
    "1 and 1": cluster((SLOW, 1), (FAST, 1)),
    "5, 1 and 2": cluster((FAST, 5), (SLOW, 1), (SLOWEST, 2)),
}


def plan(case: Case, machines: ap.Cluster, **options: object) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, cluster=machines, **options)


LARGE = {"6 and 6", "4 and 8", "3 and 8"}


@cache
def language() -> Case:
    return gpt(layers=2, batch=8)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_nodes_have_a_plan_that_is_exact_and_survives_its_file(
    name: str, tmp_path: Path
) -> None:
    of_one = mlp(layers=3) if name in LARGE else language()
    made = plan(of_one, UNEVEN[name], microbatches=2)
    assert made.whole_mesh.size == made.cluster.devices
    made.save(tmp_path / "plan.json")
    case = of_one.fresh()
    again = ap.Plan.load(tmp_path / "plan.json").attach(case.model, case.args, case.kwargs)
    assert again.cost == made.cost
    module = ap.parallelize(case.model, case.args, case.kwargs, plan=again, backend="virtual")
    expected = single_outcome(of_one.fresh(), steps=3)
    assert_equal(parallel_outcome(module, case, steps=3), expected)


def test_a_node_that_is_slower_than_nothing_is_not_used_and_the_plan_says_so() -> None:
    made = plan(language(), cluster((FAST, 2), (SLOWEST, 2)))
    assert made.cluster.used == (2, 0)
    assert made.whole_mesh.size == 2
    assert "not used   2 of 2 x slowest in node 1" in str(made)
    assert made.to_json()["not_used"] == ["2 of 2 x slowest in node 1"]
    machines = cluster((FAST, 2), (SLOWEST, 2))
    every = [plan(language(), machines, mesh=mesh) for mesh in (ap.Mesh(dp=4), ap.Mesh(tp=4))]
    assert made.cost.seconds < min(one.cost.seconds for one in every)
    first = plan(language(), cluster((SLOWEST, 2), (FAST, 2)))
    assert first.cluster.used == (0, 2)
    assert first.cost.seconds == pytest.approx(made.cost.seconds)
    assert first.cluster.device.name == "fast"


def test_a_slow_node_gets_its_share_of_the_layers() -> None:
    """Three times as slow, a third of the work: both are busy all the time."""
    case = mlp(layers=16, batch=8)
    for nodes, place in (((FAST, 1), (SLOW, 1)), 1), (((SLOW, 1), (FAST, 1)), 0):
        options = {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}
        made = plan(case, cluster(*nodes), mode="propagate", **options)
        held = [stage.parameters for stage in made.pipelining.stages]
        assert 2 < held[1 - place] / held[place] < 4.5
        slow, fast = (made.pipelining.stages[at].seconds for at in (place, 1 - place))
        assert 0.7 < slow / fast < 1.4


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_no_other_cut_is_faster_where_messages_take_long(schedule: str) -> None:
    """Some schedules do other work while messages are on their way, others wait for them."""
    machines = cluster((FAST, 1), (SLOW, 1), network=8e6)
    options = {"mesh": ap.Mesh(pp=2), "schedule": schedule, "microbatches": 8, "mode": "propagate"}

    def case() -> Case:
        return mlp(layers=9, batch=64, hidden=128)

    made, found = plan(case(), machines, **options), []
    for layer in range(1, 8):
        pinned = case()
        ap.shard(pinned.model.layers[layer], stage=1)
        found.append(plan(pinned, machines, **options).seconds)
    assert made.seconds <= min(found) * (1 + 1e-9)


def test_each_stage_keeps_within_the_memory_of_its_own_devices() -> None:
    """The fast one has little: the slow one takes what does not fit there."""
    case = mlp(layers=16, batch=8)
    options = {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4, "states": "whole"}
    free = plan(case, cluster((FAST, 1), (SLOW, 1)), **options)
    most = max(memory.peak for memory in free.memories)
    small = replace(FAST, memory=0.6 * most)
    made = plan(case, cluster((small, 1), (SLOW, 1)), recompute=None, **options)
    first, second = (memory.peak for memory in made.memories)
    assert first <= small.memory < second <= SLOW.memory
    assert made.limit == small.memory
    # Who says how much each device may take means all of them.
    with pytest.raises(ap.AutoparError, match="fits into the memory"):
        plan(case, cluster((FAST, 1), (SLOW, 1)), memory=0.5 * most, recompute=None, **options)


@pytest.mark.parametrize("when", [0, 1])
def test_an_interrupt_ends_the_choice_with_the_best_so_far(when: int, monkeypatch) -> None:
    kept, begun = Planner.best, list[Planner]()

    def best(planner: Planner, *wanted: object) -> list[Candidate]:
        begun.append(planner)
        if len(begun) > when:
            raise nothing_found_yet()
        return kept(planner, *wanted)

    monkeypatch.setattr(Planner, "best", best)
    options = {"microbatches": 1, "states": "whole", "recompute": None}
    if not when:
        with pytest.raises(ap.AutoparError, match="until it has found a plan"):
            plan(mlp(layers=4), cluster((SLOW, 1), (FAST, 2)), **options)
        return
    made = plan(mlp(layers=4), cluster((SLOW, 1), (FAST, 2)), **options)
    assert len(begun) == 2
    assert made.cluster == begun[0].request.cluster
    assert made.search.interrupted


def test_what_fails_on_a_part_of_the_machines_is_no_interrupt(monkeypatch) -> None:
    kept, begun = Planner.best, list[Planner]()

    def best(planner: Planner, *wanted: object) -> list[Candidate]:
        begun.append(planner)
        if len(begun) > 1:
            raise ap.ExecutionError("a pass gives a program", got="none", remedy="mend it")
        return kept(planner, *wanted)

    monkeypatch.setattr(Planner, "best", best)
    with pytest.raises(ap.ExecutionError, match="a pass gives a program"):
        plan(mlp(layers=4), cluster((SLOW, 1), (FAST, 2)), microbatches=1)


def test_where_no_part_of_the_machines_is_faster_none_is_said_to_be_too_small(monkeypatch) -> None:
    """The least that is needed is looked for where nothing fits, not where nothing is faster."""

    def least(asked: object, search: object) -> None:
        raise AssertionError("all fits")

    monkeypatch.setattr(loop, "minimum_memory", least)
    for name in ("4 and 8", "5, 1 and 2"):
        assert len(list(offers(UNEVEN[name]))) > 1
        plan(mlp(layers=3), UNEVEN[name], microbatches=1)


def test_stages_promise_more_than_lock_step_with_a_slow_node() -> None:
    """Their work may be as uneven as they are fast: what promises most is looked at first, and time
    may be over before the rest is. Yet few are as uneven as these."""
    case, machines = mlp(layers=4), cluster((FAST, 4), (SLOWEST, 4))
    captured = capture(case.model, case.args, case.kwargs)
    options = PlanOptions(cluster=machines)
    planner = Planner(case.model, captured, read_request(options), lambda *told: None)
    straight = Question(captured, (ap.Mesh(x=8),), microbatches=2)
    staged = Question(
        captured, (ap.Mesh(x=4),), stages=2, microbatches=2, schedule=ScheduleName("1f1b")
    )
    assert planner.seconds(staged) < planner.seconds(straight)


def outer_choices(machines: ap.Cluster, parts: int) -> list[tuple[ap.Cluster, dict]]:
    """Every use of the devices, every number of stages, mesh and schedule."""
    found: list[tuple[ap.Cluster, dict]] = []
    counts = [range(node.devices + 1) for node in machines.nodes]
    for used in itertools.product(*counts):
        if not sum(used):
            continue
        part = replace(machines, used=used)
        for mesh in meshes(part.devices, 2, part.devices) if part.devices > 1 else []:
            found.append((part, {"mesh": mesh, "pipeline": None}))
        for stages in range(2, part.devices + 1):
            if part.devices % stages:
                continue
            inner = part.devices // stages
            for mesh in meshes(inner, 2, inner) if inner > 1 else [ap.Mesh(x=1)]:
                for made in weighed_schedules(stages, parts):
                    if made.parts > 1:  # a number of micro-batches that is given is not halved
                        continue
                    whole = ap.Mesh(pp=stages, **mesh.sizes)
                    found.append((part, {"mesh": whole, "schedule": made}))
    return found


@pytest.mark.parametrize(
    "machines",
    [
        cluster((SLOW, 1), (FAST, 2)),
        cluster((FAST, 2), (SLOW, 2), network=1e7),
        cluster((SLOW, 2), (FAST, 4)),
        cluster((FAST, 1), (FAST, 3), network=1e7),
    ],
    ids=["1 and 2", "2 and 2", "2 and 4", "1 and 3 alike"],
)
def test_no_other_use_of_small_mixed_machines_is_faster(machines: ap.Cluster) -> None:
    case = mlp(layers=4, batch=8)
    made = plan(case, machines, microbatches=4, states="whole", recompute=None)
    offered = {part.used_of_nodes for part in offers(machines)}
    compared = 0
    for part, options in outer_choices(machines, 4):
        if part.used_of_nodes not in offered:
            continue
        try:
            other = plan(
                case, part, microbatches=4, states="whole", recompute=None, mode="auto", **options
            )
        except ap.AutoparError:  # more stages than layers
            continue
        compared += 1
        fastest = made.alternatives[0].seconds
        assert fastest <= other.cost.seconds * (1 + 1e-6), (part.used, options)
    assert compared > 10
    assert made.cost.seconds <= 1.01 * fastest


def test_what_would_be_there_is_what_a_plan_is_there() -> None:
    """Which devices are worth it is decided anew, too."""
    medium = replace(SLOW, name="medium", flops={"f32": 2.2e9, "f64": 2.2e9}, bandwidth=9e9)
    case, slow = mlp(layers=3, batch=512), cluster((FAST, 4), (medium, 4), network=1e6)
    made = plan(case, slow, microbatches=1, states="whole")
    assert made.cluster.used_of_nodes != (4, 4)
    found = made.what_if(bandwidth=1e9, search=True).searched
    there = replace(slow, network=replace(slow.network, bandwidth=1e9))
    wanted = plan(case, there, microbatches=1, states="whole")
    assert wanted.cluster.used_of_nodes == (4, 4)
    assert found is not None
    assert found.way.seconds == pytest.approx(wanted.seconds, rel=1e-9)
