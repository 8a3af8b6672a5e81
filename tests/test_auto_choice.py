"""What the search chooses where a person knows the answer, on real machines and real sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

import autopar as ap
from autopar.cluster import Link
from autopar.layout import Layout
from autopar.mesh import Mesh
from tests.large_models import classifier, feed_forward, resnet50
from tests.models import GPT, Case

H100 = ap.Cluster.preset("dgx-h100")


def auto(case: Case, cluster: ap.Cluster = H100, **options: object) -> ap.Plan:
    options.setdefault("pipeline", None)
    return ap.plan(case.model, case.args, case.kwargs, cluster=cluster, mode="auto", **options)


def language(*, batch: int, sequence: int, hidden: int, heads: int, layers: int = 2) -> Case:
    with torch.device("meta"):
        model = GPT(50304, sequence, hidden, heads, layers, True, False, 0.0).bfloat16()
        ids = torch.empty(batch, sequence, dtype=torch.long)
    return Case("gpt", model, (ids, ids))


def weights(plan: ap.Plan) -> dict[str, Layout]:
    names = plan.captured.parameters.values()
    return {name: plan.layouts[name] for name in names if plan.layouts[name].ndim > 1}


def test_weights_larger_than_activations_are_cut() -> None:
    """A wide MLP with a small batch becomes tensor-parallel: activations are cheap to move."""
    plan = auto(feed_forward(batch=64, width=8192))
    assert all(layout.axes for layout in weights(plan).values())
    assert plan.layouts["layers.0.weight"].dims[1] == ()  # by columns, then by rows
    assert plan.layouts["layers.2.weight"].dims[0] == ()


def test_activations_larger_than_weights_are_cut() -> None:
    """A small model with a large batch becomes data-parallel: gradients are cheap to sum."""
    plan = auto(feed_forward(batch=65536, width=256))
    assert not any(layout.axes for layout in weights(plan).values())


def test_very_many_classes_are_cut_by_class() -> None:
    """The last layer has most of the weights: summing its gradients would take half of the step."""
    case = classifier()
    plan = auto(case)
    assert plan.layouts["head.weight"].dims[0] != ()
    losses = [name for name in plan.decisions.strategies if name.startswith("cross_entropy")]
    assert plan.decisions.strategies[losses[0]].by_factor.get("v")
    data = ap.plan(case.model, case.args, cluster=H100, mesh=Mesh(dp=8), mode="data")
    assert plan.cost.seconds <= 0.6 * data.cost.seconds


@cache
def residual_network() -> ap.Plan:
    return auto(resnet50(batch=256), mesh=Mesh(x=8))


def test_convolutions_over_large_images_are_data_parallel() -> None:
    """Images are far larger than kernels."""
    plan = residual_network()
    kernels = [layout for layout in weights(plan).values() if layout.ndim == 4]
    assert len(kernels) == 53
    assert not any(layout.axes for layout in kernels)


def test_tight_memory_makes_a_gpt_block_megatron_with_the_sequence_cut_between() -> None:
    """One sequence: no batch to cut. Replicated weights do not fit, cut ones and activations do."""
    case = language(batch=1, sequence=4096, hidden=8192, heads=64, layers=4)
    plan = auto(case, mesh=Mesh(tp=8), memory=6e9)
    layouts = plan.layouts
    assert layouts["layers.1.up.weight"].dims == (("tp",), ())
    assert layouts["layers.1.down.weight"].dims == ((), ("tp",))
    norms = [name for name in layouts if name.startswith("layer_norm")]
    assert all(layouts[name].dims == ((), ("tp",), ()) for name in norms)


def test_a_tied_embedding_and_head_agree() -> None:
    plan = auto(language(batch=1, sequence=2048, hidden=4096, heads=32), mesh=Mesh(tp=8))
    stored = plan.layouts["tokens.weight"]
    assert [name for name in plan.captured.parameters.values() if "head" in name] == []
    head = [n for n, s in plan.decisions.strategies.items() if n.startswith("linear")][-1]
    strategy = plan.decisions.strategies[head].by_factor
    assert stored.dims[0] == strategy.get("o", ())


def test_over_a_slow_network_tensor_parallelism_stays_inside_a_node() -> None:
    """Activations move in every layer, gradients once a step."""
    node = replace(H100.nodes[0], devices=4, rails=4)
    cluster = ap.Cluster((node, node), Link(2e-5, 25e9), "two")
    case = language(batch=32, sequence=2048, hidden=4096, heads=32)
    plan = auto(case, cluster=cluster)
    links = cluster.axis_links(plan.mesh)
    inside = {axis for axis in plan.mesh if links[axis].level == "inside"}
    assert inside
    assert inside != set(plan.mesh)
    cut = {axis for layout in weights(plan).values() for axis in layout.axes}
    assert cut
    assert cut <= inside
