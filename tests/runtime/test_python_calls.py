"""Python functions that replace operators compute what the operators do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar._torch.operators import python_call
from tests.strategies.rule_cases import CASES, i, t, u
from tests.strategies.rule_law import Case

aten = torch.ops.aten
CLASSES = torch.tensor([0, 2, 1])
SIGNS = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
LEFT_OUT = [  # what no rule case leaves out, or gives as None
    Case("index_put", aten.index_put.default, (t(5, 4), [None, i(4, 2)], t(5, 2))),
    Case("index", aten.index.Tensor, (t(5, 4, 3), [None, i(4, 2), None])),
    Case("repeat_interleave", aten.repeat_interleave.self_int, (t(4, 3), 2)),
    Case("cross_entropy_loss", aten.cross_entropy_loss.default, (t(3, 4), CLASSES)),
    Case("nll_loss_nd", aten.nll_loss_nd.default, (t(3, 4), CLASSES)),
    Case("nll_loss", aten.nll_loss.default, (t(3, 4), CLASSES)),
    Case("multi_margin_loss", aten.multi_margin_loss.default, (t(3, 4), CLASSES)),
    Case("multilabel", aten.multilabel_margin_loss.default, (t(3, 4), i(4, 3, 4))),
    Case("binary", aten.binary_cross_entropy.default, (u(3, 4), u(3, 4))),
    Case("logits", aten.binary_cross_entropy_with_logits.default, (t(3, 4), u(3, 4))),
    Case("soft_margin_loss", aten.soft_margin_loss.default, (t(3), SIGNS)),
    Case("margin_ranking_loss", aten.margin_ranking_loss.default, (t(3), t(3), SIGNS)),
    Case("hinge_embedding_loss", aten.hinge_embedding_loss.default, (t(3), SIGNS)),
    Case("cosine", aten.cosine_embedding_loss.default, (t(3, 4), t(3, 4), SIGNS)),
    Case("triplet", aten.triplet_margin_loss.default, (t(3, 4), t(3, 4), t(3, 4))),
    *(
        Case(loss, getattr(aten, loss).default, (t(3, 4), u(3, 4)))
        for loss in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "kl_div")
    ),
]


@pytest.mark.parametrize("case", [*CASES, *LEFT_OUT], ids=lambda case: case.name)
def test_a_python_call_is_the_operator(case: Case) -> None:
    """All arguments given; then without those, one after the other, that may be left out."""
    for args, kwargs in shorter(case):
        function, named = python_call(case.target, args, kwargs)
        torch.manual_seed(0)
        wanted = results(case.target(*args, **kwargs))
        torch.manual_seed(0)
        got = results(function(*args, **named))
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert [x.requires_grad for x in got] == [x.requires_grad for x in wanted]


def shorter(case: Case) -> list[tuple[tuple, dict]]:
    """The arguments of a case, and fewer of them, as far as the operator takes that."""
    found = [(case.args, case.kwargs)]
    if case.target is aten._weight_norm.default or not str(case.target).startswith("aten."):
        return found  # norms of other dims than the default end torch's process
    required = sum(not a.has_default_value() for a in case.target._schema.arguments)
    for number in range(required, len(case.args) + 1):
        try:
            case.target(*case.args[:number])
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue  # some arguments go together
        found.append((case.args[:number], {}))
    return found


def results(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
