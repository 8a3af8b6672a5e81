"""What experts hold to, the automatic choice holds to as well."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import autopar as ap
from autopar.candidates.alternative import Alternative
from autopar.candidates.state_places import data_axes
from autopar.cluster import Link
from autopar.planner.record import HOSTED
from autopar.planner.rules import SIMPLER
from autopar.strategies.node_info import info
from tests import large_models, models
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import EVEN, machines

(NODE,) = machines(4, *EVEN).nodes
SPEEDS = {"slow network": 1e8, "fast network": 5e8}
LIMITS = (1.0, 0.5)  # of the memory that the choice takes without a limit


def two_nodes(speed: float) -> ap.Cluster:
    return ap.Cluster((NODE, NODE), Link(1e-6, speed), "two nodes")


@cache
def chosen(network: str, share: float) -> ap.Plan:
    """The choice for a small GPT."""
    case = models.shared("gpt", hidden=64, sequence=16, layers=2, batch=8)
    memory = None if share == 1.0 else share * chosen(network, 1.0).memory.peak
    options = {"cluster": two_nodes(SPEEDS[network]), "memory": memory, "seconds": 4}
    return ap.plan(case.model, case.args, case.kwargs, **options)


every_choice = pytest.mark.parametrize(
    ("network", "share"), [(network, share) for network in SPEEDS for share in LIMITS]
)


def is_hosted(way: Alternative) -> bool:
    return "host" in way.how


def axes_of(way: Alternative) -> int:
    return sum(size > 1 for size in way.mesh.shape)


@every_choice
def test_nothing_is_on_the_host_while_devices_take_at_most_a_tenth_more(network, share) -> None:
    """What is on the host has to be copied, and its memory and cores are shared by others."""
    plan = chosen(network, share)
    on_devices = [way.seconds for way in plan.alternatives if way.fits and not is_hosted(way)]
    if plan.states.is_on_host or plan.decisions.keeps_on_host:
        assert plan.seconds * (1 + HOSTED) <= min(on_devices, default=float("inf"))


@pytest.mark.parametrize("network", SPEEDS)
def test_tensors_are_cut_inside_a_node_for_they_move_with_every_layer(network) -> None:
    plan = chosen(network, 1.0)
    links = plan.cluster.axis_links(plan.whole_mesh)
    assert all(link.level == "inside" for axis, link in links.items() if axis.startswith("tp"))


@every_choice
def test_a_pipeline_crosses_the_slow_links_for_it_moves_least(network, share) -> None:
    plan = chosen(network, share)
    if plan.pipelining is not None:
        links = plan.cluster.axis_links(plan.whole_mesh)
        slow = [axis for axis, link in links.items() if link.level == "between"]
        assert slow[:1] == [plan.pipelining.axis]


@every_choice
def test_no_plan_of_fewer_axes_is_within_a_percent_for_fewer_are_understood(network, share) -> None:
    plan = chosen(network, share)
    axes = sum(size > 1 for size in plan.whole_mesh.shape)
    simpler = [
        way.seconds
        for way in plan.alternatives
        if way.fits and axes_of(way) < axes and way.states == plan.states and not is_hosted(way)
    ]
    assert min(simpler, default=float("inf")) > plan.seconds * (1 + SIMPLER) * (1 - 1e-9)


@every_choice
def test_not_all_runs_again_where_half_of_the_memory_is_free(network, share) -> None:
    plan = chosen(network, share)
    kinds = [kind.kind for kind in plan.decisions.recompute.values()]
    if kinds and all(kind == "full" for kind in kinds):
        assert plan.memory.peak > 0.5 * (plan.limit or 0.0)


def test_experts_are_spread_over_ranks_that_cut_the_batch_for_tokens_move_least_so() -> None:
    """Other parameters have replicas on the ranks among which experts are shared out."""
    with torch.device("meta"):
        case = large_models.mixtral(batch=32, sequence=512, layers=2)
    options = {"cluster": ap.Cluster.preset("dgx-h100"), "pipeline": None, "microbatches": 1}
    precision = ap.Precision(compute=torch.bfloat16)
    plan = ap.plan(case.model, case.args, case.kwargs, precision=precision, **options)
    of_experts = {axis for axis in plan.mesh if axis.startswith("ep")}
    assert of_experts
    for node, axes in data_axes(plan.rewritten, plan.mesh).items():
        value = info(node).val
        if value.ndim == 2 and value.shape[0] == value.shape[1]:  # of attention
            assert of_experts & {*axes}
