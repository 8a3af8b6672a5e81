"""What torch.vmap makes of a function is a part of the program like any other."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.capture import capture, run
from tests.capture.support import Function, program, random, targets


def test_a_mapped_function_is_its_operators() -> None:
    def forward(self: Function, x: Tensor, kept: Tensor) -> Tensor:
        def seen(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & kept[row, key]

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            seen = torch.vmap(seen, in_dims=dims)  # type: ignore[assignment]
        mask = seen(torch.arange(3), torch.arange(4), torch.arange(4))
        y = torch.func.vmap(self.linear, in_dims=1, out_dims=1)(x)
        y *= 2  # beside a write
        scores = y @ y.transpose(-1, -2)
        return scores.masked_fill(~mask, 0.0) + torch.vmap(torch.outer)(y[:, 0], x[:, 0])

    kept = torch.tensor([[True, True, False, True]] * 2 + [[True] * 4])
    found = targets(program(forward, random(3, 4, 4), kept))
    assert not any("batch" in name or "vmap" in name for name in found)


def test_a_mapped_function_casts_as_it_says() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            row = row @ self.linear.weight
            with torch.autocast("cpu", enabled=False):
                row = row.float() @ self.linear.weight
            return row @ x[:4]

        with torch.autocast("cpu", torch.bfloat16):
            return torch.vmap(one)(x).float().square().mean()

    model, x = Function(forward), random(8, 4).float()
    captured = capture(model, (x,))
    found, _ = run(captured, dict(model.named_parameters()), {}, (x,), {})
    slopes = [torch.autograd.grad(loss, model.linear.weight)[0] for loss in (model(x), found)]
    assert torch.equal(model(x), found)
    assert torch.equal(*slopes)
