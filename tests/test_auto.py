"""Automatic plans: numerically exact, and what the search assumed is what the program does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.mesh import Mesh
from autopar.strategies import tensor_inputs
from tests.models import ZOO, Case, mlp
from tests.parity import assert_parity
from tests.toy import EVEN, FAST, SLOW, machines

MESHES = {
    "mlp": [(Mesh(a=2, b=2, c=2), EVEN), (Mesh(a=4), FAST)],
    "resnet": [(Mesh(a=2, b=2), EVEN), (Mesh(a=4), SLOW), (Mesh(a=2, b=4), FAST)],
    "gpt": [(Mesh(a=2, b=4), EVEN), (Mesh(a=4), SLOW), (Mesh(a=2, b=2), FAST)],
    "gpt2": [(Mesh(a=2, b=2), SLOW), (Mesh(a=4), EVEN)],
    "llama": [(Mesh(a=2, b=4), FAST), (Mesh(a=4), EVEN)],
    "bert": [(Mesh(a=2, b=2), FAST), (Mesh(a=4), SLOW)],
    "vit": [(Mesh(a=2, b=4), EVEN), (Mesh(a=2), FAST)],
}
CASES = [(name, mesh, links) for name, pairs in MESHES.items() for mesh, links in pairs]


def check_agreement(plan: ap.Plan) -> None:
    """What the search added up is what the finished program takes."""
    assert plan.search is not None
    assert plan.cost.seconds == pytest.approx(plan.search.objective, rel=1e-6)
    assert plan.search.gap <= 0.01
    for node in plan.program.graph.nodes:
        if node.op == "call_function" and "movement" not in node.meta:
            for value, (layout, _) in zip(tensor_inputs(node), node.meta["wants"]):
                assert value.meta["type"].layout == layout


@pytest.mark.parametrize(
    ("name", "mesh", "links"), CASES, ids=lambda value: str(value).replace(" ", "")
)
def test_automatic_plans_are_exact_and_cost_what_the_search_said(
    name: str, mesh: Mesh, links: tuple[float, float]
) -> None:
    options = {"cluster": machines(mesh.size, *links), "mesh": mesh, "mode": "auto"}
    module = assert_parity(ZOO[name](), mesh, **{k: v for k, v in options.items() if k != "mesh"})
    check_agreement(module.plan)


class Squares(nn.Module):
    """The same tensor twice in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.up(x)
        return nn.functional.mse_loss(self.down(h * h), target)


@pytest.mark.parametrize("links", [FAST, EVEN, SLOW])
def test_an_operator_that_takes_a_tensor_twice_pays_for_both(links: tuple[float, float]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(8, 16).double(), torch.randn(8, 8).double()
    case = Case("squares", Squares().double(), (x, target))
    cluster = machines(4, *links)
    module = assert_parity(case, Mesh(a=2, b=2), mode="auto", cluster=cluster)
    check_agreement(module.plan)


def test_two_searches_in_one_process_do_not_disturb_each_other() -> None:
    case = mlp()
    wanted = [(Mesh(a=2, b=2), EVEN), (Mesh(b=2, a=2), SLOW), (Mesh(a=4), EVEN)]

    def objectives() -> list[float]:
        found = []
        for mesh, links in wanted:
            cluster = machines(4, *links)
            plan = ap.plan(case.model, case.args, mesh=mesh, cluster=cluster, mode="auto")
            assert plan.search is not None
            found.append(plan.search.objective)
        return found

    first = objectives()
    assert objectives() == first
    wanted.reverse()
    assert objectives() == first[::-1]


def test_every_mesh_is_weighed_and_the_best_is_taken() -> None:
    case = mlp()
    plan = ap.plan(case.model, case.args, cluster=machines(), mode="auto", pipeline=None)
    assert plan.search is not None
    shapes = {considered.mesh.shape for considered in plan.search.considered}
    assert shapes == {(8,), (2, 4), (4, 2), (2, 2, 2)}
    priced = [c.seconds for c in plan.search.considered if c.seconds is not None]
    assert plan.search.objective <= min(priced) * 1.003


@pytest.mark.parametrize("algorithm", ["recursive", "propagate"])
def test_the_quick_algorithms_work_and_are_never_better(algorithm: str) -> None:
    case, mesh = mlp(), Mesh(a=2, b=2)
    options = {"mesh": mesh, "cluster": machines(4), "mode": "auto"}
    exact = ap.plan(case.model, case.args, **options)
    quick = ap.plan(case.model, case.args, algorithm=algorithm, **options)
    assert quick.search is not None
    assert exact.search is not None
    assert quick.search.algorithm == algorithm
    assert quick.cost.seconds >= exact.cost.seconds * (1 - 1e-9)
    assert quick.search.bound <= exact.search.objective
