"""Weights of several in one, whose products are read in parts: nothing moves between the two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.strategies.node_info import info
from tests.captures import shared_captures
from tests.fused import options, small
from tests.models import Case
from tests.parity import assert_parity

PARTS = {"c_attn.weight": "/3", "c_attn.bias": "/3", "gate_up.weight": "/2"}


MESHES = (ap.Mesh(tp=2), ap.Mesh(tp=4), ap.Mesh(dp=2, tp=2))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["fused", "transposed"])
def test_each_part_is_cut_by_itself_and_nothing_moves_behind_it(kind: str, mesh: ap.Mesh) -> None:
    """It takes no longer to move what moves than for weights that are apart."""
    batch = 8 if "dp" in mesh else 1
    cases = [small(one, batch) for one in (kind, "apart")]
    own, apart = (ap.plan(case.model, case.args, **options(mesh)) for case in cases)
    for name, parts in PARTS.items():
        layout = own.types[f"block.{name}"].layout
        assert [dim[0] for dim in layout.dims if dim] == [parts]
    moved = own.movements()
    assert not any("/" in one.tensor or "192" in one.tensor or "256" in one.tensor for one in moved)
    assert sum(one.seconds for one in moved) <= sum(one.seconds for one in apart.movements())


@pytest.mark.parametrize("states", ["whole", "zero1", "zero3"])
@pytest.mark.parametrize("kind", ["fused", "transposed"])
def test_parity(kind: str, states: str) -> None:
    case = small(kind, 2)
    with shared_captures():
        for mesh in MESHES:
            module = assert_parity(case, **options(mesh), states=states)
            assert any("@/" in str(type_) for type_ in module.plan.types.values())


def test_a_call_beside_and_a_plan_from_a_file(tmp_path: Path) -> None:
    case = small("fused")
    plan = ap.plan(case.model, case.args, **options(ap.Mesh(tp=2)))
    plan.save(tmp_path / "plan.json")
    read = ap.Plan.load(tmp_path / "plan.json")
    module = ap.parallelize(case.fresh().model, case.args, plan=read, backend="virtual")
    assert str(module.plan.types["block.c_attn.weight"]) == "f64[192@/3@tp, 64]"
    assert "/3" in str(plan)
    for batch in (1, 3):
        x = torch.randn(batch, 8, 64, dtype=torch.float64)
        for train in (True, False):
            torch.testing.assert_close(module.train(train)(x), case.model.train(train)(x))
    case.model.train()


def test_what_is_read_otherwise_too_has_no_parts_that_matter() -> None:
    """Uneven parts, and values that are no products of parameters, are as they were."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 12)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.linear(x).split([8, 4], -1)
            three, four = x.chunk(2, -1)
            return one.sum() * two.sum() + (three * four).sum()

    captured = capture(Other(), (torch.randn(4, 8),))
    assert not any(info(node).parts for node in captured.graph.nodes)


@pytest.mark.parametrize("mode", ["auto", "propagate"])
def test_what_has_no_parts_reads_a_weight_and_its_product_too(mode: str) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(12, 32), nn.Linear(16, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.both(x)
            gate, up = y.chunk(2, -1)
            penalty = self.both.weight.square().sum() + y.square().mean()
            return self.down(gate.sigmoid() * up).square().mean() + 0.01 * penalty

    case = Case("penalised", Penalised().double(), (torch.randn(8, 6, 12, dtype=torch.float64),))
    for mesh in (ap.Mesh(x=2), ap.Mesh(x=2, y=2)):
        assert_parity(case, mesh, mode=mode)
