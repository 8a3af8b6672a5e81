"""Local calls: what a rank runs of a node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.strategies import localize_arguments, piece_call, rule_of, traits_of
from autopar.strategies.node_info import flat_values
from autopar.tensor_type import TensorType
from tests.strategies.rule_cases import CASES, t
from tests.strategies.rule_law import Case

REPEAT = torch.ops.aten.repeat_interleave.self_int
WITHOUT_RULE = [
    Case("without dim", REPEAT, (t(4, 3), 2)),
    Case("with a size", REPEAT, (t(4, 3), 2), {"output_size": 24}),
    Case("of nothing", torch.ops.aten.group_norm.default, (t(2, 0, 3), 1)),
]
WITH_SIZES = [case for case in CASES if traits_of(case.node()).of_piece]


def whole(value: Tensor) -> TensorType:
    return TensorType.of(value, Layout(*[()] * value.ndim))


@pytest.mark.parametrize("case", [*WITH_SIZES, *WITHOUT_RULE], ids=lambda case: case.name)
def test_arguments_of_a_whole_output_are_the_node_s_own(case: Case) -> None:
    node = case.node()
    types = tuple(whole(value) for value in flat_values(node.meta["val"]))
    args, kwargs = localize_arguments(node, types, Mesh(a=2), 1)
    assert (args, kwargs) == (node.args, node.kwargs)


@pytest.mark.parametrize("case", WITHOUT_RULE[:2], ids=lambda case: case.name)
def test_a_call_without_a_rule_runs_as_it_is(case: Case) -> None:
    node = case.node()
    assert rule_of(node) is None
    call = piece_call(node, None, None, types=whole(node.meta["val"]), mesh=Mesh(a=2), rank=1)
    assert call == (node.target, node.args, node.kwargs)
