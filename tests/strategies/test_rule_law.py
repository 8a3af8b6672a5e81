"""Every rule, under every strategy it yields, gives the same outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.strategies import rule_of
from tests.strategies.rule_cases import BUILT_IN, CASES, operator, t, u
from tests.strategies.rule_law import Case, Reference, check_all

MESHES = (Mesh(a=2), Mesh(a=2, b=2))
# Without values to compare: what is in fresh memory, and what is drawn.
UNCOMPARED = {
    "empty": Case("empty", torch.ops.aten.empty.memory_format, ([5, 4],)),
    "new_empty": Case("new_empty", torch.ops.aten.new_empty.default, (t(3), [5, 4])),
    "empty_like": Case("empty_like", torch.ops.aten.empty_like.default, (t(5, 4),)),
    "bernoulli": Case("bernoulli", torch.ops.aten.bernoulli.default, (u(5, 4),)),
    "rand_like": Case("rand_like", torch.ops.aten.rand_like.default, (t(5, 4),)),
    "randn_like": Case("randn_like", torch.ops.aten.randn_like.default, (t(5, 4),)),
    "rand": Case("rand", torch.ops.aten.rand.default, ([5, 4],)),
    "randn": Case("randn", torch.ops.aten.randn.default, ([5, 4],)),
    "randint": Case("randint", torch.ops.aten.randint.default, (9, [5, 4])),
    "randperm": Case("randperm", torch.ops.aten.randperm.default, (5,)),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_law(case: Case) -> None:
    check_all(case, *MESHES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_law_on_ranks_without_elements(case: Case) -> None:
    """5 rows on 4 ranks are 2, 2, 1 and none."""
    reference = Reference(case)
    for mesh in (Mesh(a=3), Mesh(a=4)):
        for strategy in reference.rule.strategies(mesh):
            bounds = (
                reference.rule.bounds(f, strategy, mesh, mesh.size - 1) for f, _ in strategy.cuts
            )
            if any(length == 0 for _, length in bounds):
                reference.check(strategy, mesh)


def test_every_rule_has_a_case() -> None:
    covered = set()
    for case in [*CASES, *UNCOMPARED.values()]:
        covered |= {case.target, getattr(case.target, "overloadpacket", None)}
    missing = [str(operator) for operator in BUILT_IN if operator not in covered]
    assert not missing


@pytest.mark.parametrize("name", UNCOMPARED)
def test_random_operators_run_whole(name: str) -> None:
    rule = rule_of(UNCOMPARED[name].node())
    assert rule is not None
    random = not name.endswith(("empty", "empty_like"))
    assert rule.random == random
    assert (len(rule.strategies(MESHES[1])) == 1) == random


def test_dropout_is_random() -> None:
    rule = rule_of(Case("dropout", operator("dropout.default"), (t(5, 4), 0.5, True)).node())
    assert rule is not None
    assert rule.random
