"""Automatic plans: numerically exact, and what the search assumed is what the program does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.mesh import Mesh
from autopar.strategies import tensor_inputs
from tests.annotations import megatron, sequence, stored
from tests.models import ZOO, Case, mlp
from tests.parity import assert_parity
from tests.pipeline.models import share_captures  # noqa: F401
from tests.search.other_solvers import SOLVERS
from tests.toy import EVEN, FAST, SLOW, machines

MESHES = {
    "mlp": [(Mesh(a=2, b=2, c=2), EVEN), (Mesh(a=4), FAST)],
    "resnet": [(Mesh(a=2, b=2), EVEN), (Mesh(a=4), SLOW)],
    "gpt": [(Mesh(a=2, b=4), EVEN), (Mesh(a=4), SLOW)],
    "gpt2": [(Mesh(a=2, b=2), SLOW), (Mesh(a=4), EVEN)],
    "llama": [(Mesh(a=2, b=4), FAST), (Mesh(a=4), EVEN)],
    "bert": [(Mesh(a=2, b=2), FAST), (Mesh(a=4), SLOW)],
    "vit": [(Mesh(a=2, b=4), EVEN), (Mesh(a=2), FAST)],
}
CASES = [(name, mesh, links) for name, pairs in MESHES.items() for mesh, links in pairs]


@cache
def case_of(name: str) -> Case:
    return ZOO[name]()


def check_agreement(plan: ap.Plan, gap: float = 0.01) -> None:
    """What the search added up is what the finished program takes, and what it assumed is there."""
    assert plan.search is not None
    # States that were cut afterwards are not those that the search added up.
    said = plan.search.added_up if plan.states.is_whole else plan.search.objective
    assert plan.cost.seconds == pytest.approx(said, rel=1e-6)
    assert plan.search.gap <= gap
    targets = {node.name: node.target for node in plan.captured.graph.nodes}
    for node in plan.program.graph.nodes:
        if node.op == "call_function" and "movement" not in node.meta:
            inputs = tensor_inputs(node)
            for value, want in zip(inputs, node.meta["wants"]):
                assert value.meta["type"].layout == want.layout
            strategy = plan.decisions.strategies.get(node.name)
            if strategy is not None and node.target == targets[node.name]:  # no kernel, not fused
                signature = node.meta["rule"].signature(strategy)
                for value, layout in zip(inputs, signature.inputs):
                    assert value.meta["type"].layout == layout
                assert node.meta["type"].layout == signature.outputs[0]


@pytest.mark.parametrize(
    ("name", "mesh", "links"), CASES, ids=lambda value: str(value).replace(" ", "")
)
def test_automatic_plans_are_exact_and_cost_what_the_search_said(
    name: str, mesh: Mesh, links: tuple[float, float]
) -> None:
    options = {"cluster": machines(mesh.size, *links), "mesh": mesh, "mode": "auto"}
    module = assert_parity(case_of(name), mesh, **{k: v for k, v in options.items() if k != "mesh"})
    check_agreement(module.plan)


WAYS: dict[str, Callable[[Case], Case]] = {
    "Megatron": megatron,
    "Megatron with the sequence": lambda case: sequence(megatron(case, "tp"), "tp", "dp"),
    "ZeRO-3": lambda case: stored(case, ("dp", "tp")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_plans_around_annotations_cost_what_the_search_said(name: str, way: str) -> None:
    case = WAYS[way](ZOO[name](layers=1))
    options = {"mesh": Mesh(dp=2, tp=2), "cluster": machines(4, *EVEN)}
    plan = ap.plan(case.model, case.args, case.kwargs, mode="auto", **options)
    check_agreement(plan)


@pytest.mark.parametrize(("name", "part"), [("vit", 0.7), ("resnet", 0.7), ("gpt2", 0.75)])
def test_plans_under_a_limit_are_exact_and_cost_what_the_search_said(
    name: str, part: float
) -> None:
    case, mesh = case_of(name), Mesh(a=2, b=2)
    options = {"mode": "auto", "cluster": machines(4, *EVEN), "states": "whole", "recompute": None}
    free = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, **options)
    limit = free.memory.peak * part
    module = assert_parity(case, mesh, memory=limit, **options)
    assert module.plan.memory.peak <= limit
    check_agreement(module.plan, gap=0.02)


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
def test_the_quick_algorithms_work_and_are_never_better(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, mesh = mlp(), Mesh(a=2, b=2)
    options = {"mesh": mesh, "cluster": machines(4), "mode": "auto"}
    exact = ap.plan(case.model, case.args, **options)
    monkeypatch.setattr("autopar.search.layout_search.solve", SOLVERS[algorithm])
    quick = ap.plan(case.model, case.args, **options)
    assert quick.search is not None
    assert exact.search is not None
    assert quick.cost.seconds >= exact.cost.seconds * (1 - 1e-9)
    assert quick.search.bound <= exact.search.objective
