"""Gradient sums between places of a pipeline: each once, over all holders, on their links."""

from __future__ import annotations

from functools import cache

import pytest

import autopar as ap
from autopar.cluster.machines import Link, Node
from autopar.cost.rooflines import collective_seconds
from autopar.pipeline import schedule, simulate
from autopar.pipeline.simulation.step_price import pipeline_reductions
from autopar.plans.plan import Plan
from tests import models
from tests.models import Case

INSIDE, NETWORK = Link(1e-6, 300e9), Link(1e-5, 10e9)
DEVICE = ap.Cluster.preset("dgx-a100").device
TIED = 61 * 32 * 8  # bytes of the embedding, which the head reads too


@cache
def gpt(tied: bool) -> Case:
    return models.gpt(layers=4, tied=tied)


def planned(name: str, ranks: int, tied: bool = True, nodes: int = 1) -> Plan:
    case, node = gpt(tied), Node(DEVICE, ranks // nodes, INSIDE)
    about = {"schedule": name, "microbatches": 4, "mode": "propagate"}
    cluster = ap.Cluster((node,) * nodes, NETWORK, "small")
    return ap.plan(case.model, case.args, mesh=ap.Mesh(pp=ranks), cluster=cluster, **about)


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "places"),
    [
        ("1f1b", 2, (0, 1), (0, 1)),
        ("gpipe", 4, (0, 3), (0, 3)),
        ("interleaved", 2, (0, 3), (0, 1)),
        ("chimera", 4, (0, 3), (0, 3)),
        ("zb-v", 2, (0, 3), None),  # both on rank 0
    ],
)
def test_what_stages_share_is_summed_once(name, ranks, stages, places) -> None:
    plan = planned(name, ranks)
    assert plan.pipelining is not None
    assert [(one.stages, one.bytes) for one in plan.pipelining.shared] == [(stages, TIED)]
    found = {one.stages: one for one in pipeline_reductions(plan.pipelining)}
    if places is None:
        assert not found
        return
    assert found[stages].places == places
    assert found[stages].moved.bytes == TIED
    # All other parameters are summed where there are copies of stages.
    sums = sum(one.moved.bytes for one in found.values())
    assert sums == (sum(p.nbytes for p in gpt(True).model.parameters()) if "chi" in name else TIED)


def test_stages_that_share_nothing_sum_nothing() -> None:
    plan = planned("1f1b", 2, tied=False)
    assert plan.pipelining is not None
    assert plan.pipelining.shared == ()
    assert pipeline_reductions(plan.pipelining) == []
    assert plan.cost.gradient_sync == 0


@pytest.mark.parametrize(("nodes", "link"), [(1, INSIDE), (2, NETWORK)])
def test_it_takes_what_the_links_between_its_places_give(nodes: int, link: Link) -> None:
    """The first and the last stage are on different nodes, if there are two."""
    plan = planned("1f1b", 4, nodes=nodes)
    (one,) = plan.cluster.replica_links([(rank,) for rank in range(4)], [(0, 3)])
    assert one.link.alpha == link.alpha
    assert plan.cost.gradient_sync == pytest.approx(
        float(collective_seconds("all_reduce", one, TIED))
    )
    assert plan.timeline is not None
    (sync,) = [one for one in plan.timeline.synchronizations if one.end > one.start]
    assert (sync.name, sync.ranks) == ("stages 0 and 3", (0, 3))
    assert plan.seconds == pytest.approx(plan.timeline.makespan + plan.timeline.uncovered_sync)


def test_a_sum_of_several_stages_begins_when_all_of_them_are_done() -> None:
    made = schedule("1f1b", stages=4, microbatches=4)
    timeline = simulate(made, sync="eager", shared_sync={(1, 3): 2.0})
    (sync,) = [one for one in timeline.synchronizations if one.end > one.start]
    assert (sync.stages, sync.ranks) == ((1, 3), (1, 3))
    assert sync.start == max(timeline.ends[1][-1], timeline.ends[3][-1])
    assert sync.end == sync.start + 2
