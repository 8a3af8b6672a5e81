"""Orders that are known of ways to run a step, each found again, with its reason.

Models are on the meta device and have real sizes; machines are real ones, or differ from them in
what a test is about.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar as ap
from autopar import Mesh
from autopar.cluster import Link
from tests.annotations import megatron
from tests.large_models import long_llama
from tests.models import GPT, Case, gpt
from tests.pipeline.models import share_captures  # noqa: F401
from tests.test_auto_choice import language, weights
from tests.toy import machines

H100 = ap.Cluster.preset("dgx-h100").nodes[0]


def nodes(count: int, devices: int, network: float, **node: object) -> ap.Cluster:
    one = replace(H100, devices=devices, rails=devices, **node)
    return ap.Cluster((one,) * count, Link(6e-6, network), "nodes")


def test_operators_are_cut_inside_a_node_since_their_results_move_in_every_layer() -> None:
    """And gradients are summed across, once a step."""
    case, toy = megatron(gpt(layers=2, batch=16, sequence=16)), machines(4).nodes[0]
    cluster = ap.Cluster((toy, toy), Link(1e-6, 1e8), "toy")
    options = {"cluster": cluster, "mode": "propagate"}
    inside, across = (
        ap.plan(case.model, case.args, mesh=mesh, **options)
        for mesh in (Mesh(dp=2, tp=4), Mesh(tp=4, dp=2))
    )
    assert inside.cost.seconds < across.cost.seconds


def test_a_pipeline_goes_across_nodes_and_operators_are_cut_inside_since_it_sends_least() -> None:
    case = language(batch=2, sequence=2048, hidden=8192, heads=64, layers=4)
    cluster = nodes(2, 4, 25e9)
    plan = ap.plan(case.model, case.args, cluster=cluster)
    assert plan.whole_mesh["pp"] == 2
    (at,) = {plan.line.before}
    assert at == ()  # its places lie in a node each
    cut = {axis for layout in weights(plan).values() for axis in layout.axes}
    assert cut
    links = [cluster.place_links(plan.whole_mesh, (axis,), "pp") for axis in sorted(cut)]
    assert {link.level for places in links for link in places} == {"inside"}


@pytest.mark.parametrize("bandwidth", [450e9, 25e9])
def test_heads_change_hands_since_that_moves_less_than_a_whole_sequence(bandwidth: float) -> None:
    """Ulysses: of a long sequence, a rank exchanges a part for a part of all heads, and weights are
    whole. Megatron's way gathers the sequence before each block, and cuts the weights."""
    case = long_llama(sequence=2**15, layers=1)
    roomy = replace(H100.device, memory=1e12)
    cluster = nodes(1, 8, 25e9, link=Link(3e-6, bandwidth), device=roomy)
    plan = ap.plan(case.model, case.args, cluster=cluster, mesh=Mesh(sp=8))
    attention = str(plan.decisions.strategies["scaled_dot_product_attention"])
    assert attention == "b1@sp"
    blocks = [layout for name, layout in weights(plan).items() if name.startswith("layers")]
    assert len(blocks) == 7
    assert not any(layout.axes for layout in blocks)


@cache
def bert() -> Case:
    with torch.device("meta"):
        model = GPT(1024, 128, 1024, 16, 8, False, False, 0.0)
        ids = torch.empty(64, 128, dtype=torch.long)
    return Case("bert", model, (ids, ids))


def piz_daint(schedule: str, memory: float | None = None, **options: object) -> ap.Plan:
    cluster = ap.Cluster.preset("piz-daint", nodes=4)
    about = {"mesh": Mesh(pp=4), "microbatches": 8, "states": "whole", "schedule": schedule}
    given = {**about, "cluster": cluster, "memory": memory, **options}
    return ap.plan(bert().model, bert().args, **given)


def test_chimera_beats_dapple_beats_gpipe_at_equal_memory_by_bubbles_and_recomputing() -> None:
    """Chimera fills bubbles from both ends. GPipe keeps all micro-batches at once, and computes
    again what has no room; 1f1b waits as long, and keeps fewer."""
    both = [piz_daint(name, recompute=None) for name in ("1f1b", "chimera")]
    memory = max(plan.memory.peak for plan in both)
    assert piz_daint("gpipe", recompute=None).memory.peak > memory
    gpipe, dapple, chimera = (piz_daint(name, memory) for name in ("gpipe", "1f1b", "chimera"))
    assert chimera.cost.seconds < dapple.cost.seconds < gpipe.cost.seconds
    assert gpipe.decisions.recompute
    assert not dapple.decisions.recompute


def test_parameters_are_gathered_for_each_use_only_where_memory_needs_it() -> None:
    """ZeRO-3 moves more than an all-reduce of gradients."""
    case = language(batch=16, sequence=1024, hidden=2048, heads=16)
    options = {"cluster": nodes(1, 4, 25e9), "mesh": Mesh(dp=4), "recompute": None}
    free = ap.plan(case.model, case.args, **options)
    assert free.states.is_whole
    third = ap.plan(case.model, case.args, states="zero3", **options)
    assert third.memory.peak < free.memory.peak
    assert third.cost.seconds > free.cost.seconds
    between = ap.plan(case.model, case.args, memory=0.9 * free.memory.peak, **options)
    tight = ap.plan(case.model, case.args, memory=1.01 * third.memory.peak, **options)
    assert (between.states.parameters, tight.states.parameters) == (1, "all")
    assert free.cost.seconds <= between.cost.seconds <= tight.cost.seconds
