"""Every rule, under every strategy it yields, gives the same outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.strategies.kernels.attention.sliced import sliced_attention
from tests.strategies.rule_cases import BUILT_IN, CASES, t
from tests.strategies.rule_law import Case, Reference, check_all

SQUARE = Mesh(a=2, b=2)  # its strategies are also those of one axis, beside replicas
# Without values to compare: what is in fresh memory.
UNCOMPARED = {
    "empty": Case("empty", torch.ops.aten.empty.memory_format, ([5, 4],)),
    "new_empty": Case("new_empty", torch.ops.aten.new_empty.default, (t(3), [5, 4])),
    "empty_like": Case("empty_like", torch.ops.aten.empty_like.default, (t(5, 4),)),
    # It reads and writes what slices share: tests/pipeline/test_terapipe.py compares whole models.
    "sliced_attention": Case("sliced_attention", sliced_attention, (t(2, 4, 3, 5),)),
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_law(case: Case) -> None:
    check_all(case, SQUARE)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_law_on_ranks_without_elements(case: Case) -> None:
    """5 rows on 4 ranks are 2, 2, 1 and none."""
    reference = Reference(case)
    for mesh in (Mesh(a=3), Mesh(a=4)):
        for strategy in reference.rule.strategies(mesh):
            bounds = (
                piece
                for name, _ in strategy.cuts
                for pieces in reference.rule.pieces(name, strategy, mesh, [mesh.size - 1]).values()
                for piece in pieces
            )
            if any(length == 0 for _, length in bounds):
                reference.check(strategy, mesh)


def test_every_rule_has_a_case() -> None:
    covered = set()
    for case in [*CASES, *UNCOMPARED.values()]:
        covered |= {case.target, getattr(case.target, "overloadpacket", None)}
    missing = [str(operator) for operator in BUILT_IN if operator not in covered]
    assert not missing
