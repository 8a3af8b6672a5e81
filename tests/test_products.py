"""Products in steps around an axis: exact, priced by what they move, taken where that is least."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autopar as ap
from autopar import Mesh
from autopar.collectives import joint_kernels
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from tests.parity import assert_parity
from tests.products import products


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2)], ids=str)
def test_parity(mesh: Mesh) -> None:
    module = assert_parity(products(), mesh)
    assert "gathered_product" in str(module.graph)


def test_it_moves_the_bytes_that_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both products, forward and backward, on even pieces."""
    case, moved = products(8, 12), [0]
    plan = ap.plan(case.model, case.args, mesh=Mesh(tp=4), mode="propagate")
    strategies = {
        name: Strategy.of(scatter="tp") if strategy == Strategy.of(i="tp") else strategy
        for name, strategy in plan.decisions.strategies.items()
    }
    decisions = dataclasses.replace(plan.decisions, strategies=strategies)
    plan = plan.with_program(decisions=decisions)
    delivered = joint_kernels._deliver

    def count(asked: list[joint_kernels.RingShift]) -> list[tuple[torch.Tensor, ...]]:
        moved[0] += sum(x.nbytes for x in asked[0].tensors)
        return delivered(asked)

    monkeypatch.setattr(joint_kernels, "_deliver", count)
    module = ap.parallelize(case.model, plan=plan, backend="virtual")
    loss = module(*case.args)
    nodes = [node for node in plan.rewritten.nodes if info(node).joint is not None]
    assert [node.target.__name__ for node in nodes] == ["gathered_product", "scattered_product"]
    assert moved[0] == sum(info(node).bytes for node in nodes) == 2 * 3 * (2 * 3 * 8 * 8)
    moved[0] = 0
    loss.backward()
    assert moved[0] == 2 * 3 * (2 * 3 * 8 * 8)  # the input of the first takes no gradient
    torch.testing.assert_close(loss, case.model(*case.args))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    case = products()
    module = ap.parallelize(case.model, case.args, mesh=Mesh(tp=2), mode="propagate")
    weight = next(iter(module.parameters()))
    (gradient,) = torch.autograd.grad(module(*case.args), weight, create_graph=True)
    with pytest.raises(ap.InvalidInput, match="has a gradient, and that has none"):
        gradient.sum().backward()


class Rows(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ap.shard(x * 2, (None, "tp", None))
        return ap.shard(self.down(torch.relu(self.up(x))), (None, "tp", None)).sum()


@pytest.mark.parametrize(("bandwidth", "chosen"), [(4e12, False), (5e10, True)])
def test_the_search_takes_them_where_messages_take_long(bandwidth: float, chosen: bool) -> None:
    fast = ap.Cluster.preset("dgx-h100")
    link = dataclasses.replace(fast.nodes[0].link, bandwidth=bandwidth)
    node = dataclasses.replace(fast.nodes[0], link=link)
    cluster = dataclasses.replace(fast, nodes=(node,))
    with torch.device("meta"):
        model, x = Rows(8192).bfloat16(), torch.randn(1, 8192, 8192, dtype=torch.bfloat16)
    plan = ap.plan(model, (x,), mesh=Mesh(tp=8), cluster=cluster)
    joints = {name for s in plan.decisions.strategies.values() for name, _ in s.cuts}
    assert bool(joints & {"gather", "scatter"}) is chosen
