"""What torch.vmap makes of a function is a part of the program like any other."""

from __future__ import annotations

import torch
from torch import Tensor

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
