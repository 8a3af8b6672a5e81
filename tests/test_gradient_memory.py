"""Ownership: what a leaf keeps as its gradient has memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar._torch.leaf_gradients import unshared_gradient
from tests.combined import accumulate, assert_own_memory, combined

CASE = combined()
LAYERS: list[tuple[nn.Module, Tensor]] = [
    (nn.Linear(4, 3), torch.randn(2, 5, 4)),
    (nn.LayerNorm(4), torch.randn(2, 4)),
    (nn.Conv1d(4, 3, 2), torch.randn(2, 4, 5)),
    (nn.Embedding(4, 3), torch.tensor([1, 2])),
]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (ap.Mesh(dp=1), {}),
        (ap.Mesh(dp=2), {}),
        (ap.Mesh(dp=2), {"microbatches": 4, "states": "zero2"}),
        (ap.Mesh(dp=2, tp=2), {"microbatches": 2, "mode": "auto"}),
        (ap.Mesh(pp=2, dp=2), {"microbatches": 2, "schedule": "zb-h1"}),
    ],
)
def test_gradients_add_up_in_memory_of_their_own(mesh: ap.Mesh, options: dict[str, object]) -> None:
    """In micro-batches, in steps that add up, and where users add to them in place."""
    case, options = CASE.fresh(), {"mode": "propagate", **options}
    module = ap.parallelize(CASE.model, CASE.args, mesh=mesh, backend="virtual", **options)
    accumulate(case.run(), case.model.parameters())
    expected = {name: parameter.grad for name, parameter in case.model.named_parameters()}

    def add_up(passes: float) -> None:
        assert_own_memory(module.parameters())
        for name, gradient in module.full_grads().items():
            torch.testing.assert_close(gradient, passes * expected[name], rtol=1e-10, atol=1e-10)

    for passes in (1, 2):
        module.step(*CASE.args)
        add_up(passes)
    for parameter in module.parameters():
        parameter.grad.mul_(0.25)
    add_up(0.5)
    if "pp" not in mesh:
        module.zero_grad()
        for passes in (1, 2):
            module(*CASE.args).backward()
            add_up(passes)


def test_what_has_its_memory_alone_is_not_copied() -> None:
    copies: list[Tensor | None] = []
    for layer, x in LAYERS:
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient: copies.append(unshared_gradient(gradient)))
        layer(x).square().sum().backward()
    assert copies == [None] * 7
