"""Cost graphs of real models: folding, elimination and CP-SAT agree, blocks are found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.candidates.candidate import Candidate
from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.search.constraints import Constraints
from autopar.search.cost_graph_builder import CostGraphBuilder, MeshCostGraph
from autopar.search.solution_reader import decide
from autopar.solver.cp_sat_residual import solve_residual
from autopar.solver.optimum import Optimiser
from autopar.solver.solve import solve
from tests.models import ZOO, Case
from tests.search.other_solvers import solve_with
from tests.toy import EVEN, FAST, SLOW, machines


def built(case: Case, mesh: Mesh, links: tuple[float, float] = EVEN) -> MeshCostGraph:
    captured = capture(case.model, case.args, case.kwargs)
    return CostGraphBuilder(captured, mesh, machines(mesh.size, *links), Constraints()).run()


@pytest.mark.parametrize(
    ("name", "links"), [("gpt", EVEN), ("llama", FAST), ("bert", SLOW), ("vit", EVEN)]
)
def test_folded_and_unfolded_optimum_are_the_same(name: str, links: tuple[float, float]) -> None:
    graph = built(ZOO[name](layers=4), Mesh(a=2, b=2), links).graph
    folded = solve(graph)
    assert folded.sizes.runs
    assert folded.sizes.folded_nodes < folded.sizes.nodes
    unfolded = solve_with(Optimiser(graph.packed, fold=False))
    assert folded.objective == pytest.approx(unfolded.objective, rel=1e-9)
    assert folded.gap < 1e-9
    assert unfolded.gap < 1e-9


@pytest.mark.parametrize(
    ("name", "options", "mesh"),
    [
        ("mlp", {}, Mesh(a=2, b=2)),
        ("mlp", {"layers": 6}, Mesh(a=4)),
        ("gpt", {"layers": 1}, Mesh(a=2)),
        ("gpt2", {"layers": 1}, Mesh(a=2)),
        ("bert", {"layers": 1}, Mesh(a=2)),
        ("vit", {"layers": 1}, Mesh(a=2)),
        ("resnet", {"blocks": 2}, Mesh(a=2)),
    ],
)
def test_the_optimum_is_that_of_constraint_programming(
    name: str, options: dict[str, int], mesh: Mesh
) -> None:
    graph = built(ZOO[name](**options), mesh).graph
    found = solve(graph)
    packed = graph.packed
    factors: dict[tuple[int, ...], np.ndarray] = {}
    for scope, table in packed.tables_by_scope():
        factors[scope] = factors.get(scope, 0.0) + table.cost
    answer = solve_residual(dict(enumerate(packed.sizes.tolist())), factors, seconds=60.0)
    assert answer.gap < 1e-6
    assert found.objective == pytest.approx(answer.value, rel=1e-5)


class Square(nn.Module):
    """Compute one operator that takes the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (h * h).sum()


def test_a_tensor_that_an_operator_takes_twice_is_paid_for_twice() -> None:
    found = built(Case("square", Square(), (torch.randn(8, 16),)), Mesh(a=2, b=2))
    product = next(v for name, v in found.operators.items() if name.startswith("mul"))
    _, tables, _, edges = found.graph.tables()
    into = [tables[table] for _, high, table in edges if high == product.number]
    assert len(into) == 2
    packed = found.graph.packed
    (summed,) = [
        packed.edge_tables[table]
        for high, table in zip(packed.high.tolist(), packed.edge_table.tolist())
        if packed.origin[high] == product.number
    ]
    np.testing.assert_array_equal(summed.cost, into[0].cost + into[1].cost)
    assert np.isfinite(summed.cost).any()
    assert summed.cost[np.isfinite(summed.cost)].max() > 0


class Lines(nn.Module):
    """Call the same block on separate lines."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = x + self.b(x)
        x = x + self.c(x)
        x = x + self.d(x)
        x = x + self.e(x)
        x = x + self.f(x)
        return x.sum()


def test_equal_blocks_fold_also_when_called_on_separate_lines() -> None:
    case = Case("lines", Lines(), (torch.randn(8, 16),))
    sizes = solve(built(case, Mesh(a=2)).graph).sizes
    assert len(sizes.runs) == 1
    assert sizes.runs[0][0] >= 4


def test_deeper_models_leave_no_more_nodes_to_solve() -> None:
    folded = {
        layers: solve(built(ZOO["gpt"](layers=layers), Mesh(a=2)).graph).sizes.folded_nodes
        for layers in (5, 9)
    }
    assert folded[5] == folded[9]


def test_the_prologue_is_whole_and_ties_no_layers_together() -> None:
    """Rotary angles are read by every layer: as separate decisions they would tangle all."""
    found = built(ZOO["llama"](), Mesh(a=2, b=2))
    assert found.slack > 0
    solution = solve(found.graph)
    assert solution.sizes.core_nodes == 0
    assert found.slack <= 0.002 * solution.objective


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "llama", "bert", "vit"])
def test_a_search_counts_no_more_bytes_than_the_finished_program_holds(name: str) -> None:
    case = ZOO[name]()
    for mesh in (Mesh(x=4), Mesh(x=2, y=2)):
        made = built(case, mesh)
        choice = solve(made.graph).choice
        _, counted = made.graph.evaluate(choice)
        way = Candidate.laid_out(made.captured, machines(4, *EVEN), decide(made, choice))
        assert counted + made.fixed_bytes <= way.memory.peak, mesh
