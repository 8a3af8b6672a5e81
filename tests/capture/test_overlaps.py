"""Parameters and buffers that are pieces of one another are refused where a step changes one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests.toy import machines


class Statistics(nn.Module):
    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(8, 8), changes
        self.register_buffer("whole", torch.ones(8, 8))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out = self.linear(x) + self.whole
        if self.changes:
            self.part.mul_(0.5)
        else:
            out = out + self.part.sum()
        return nn.functional.mse_loss(out, target)


class Pieces(nn.Module):
    def __init__(self, first: slice, second: slice) -> None:
        super().__init__()
        memory = torch.randn(16, 8)
        self.first, self.second = nn.Parameter(memory[first]), nn.Parameter(memory[second])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        made = x @ self.first.t() @ self.first @ self.second.t() @ self.second
        return nn.functional.mse_loss(made, target)


REFUSED = {
    "the same bytes by another way": lambda: Foreign(),
    "a buffer that changes": lambda: Statistics(changes=True),
    "parameters": lambda: Pieces(slice(0, 16), slice(4, 8)),
    "parameters one of which begins in the other": lambda: Pieces(slice(0, 8), slice(7, 16)),
}


class Columns(nn.Module):
    """Between the first and the last element of each are some of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(one) for one in torch.randn(8, 16).chunk(2, 1))
        self.register_buffer("nothing", self.first.detach()[4:4])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        made = x @ self.first @ self.second + self.nothing.sum()
        return nn.functional.mse_loss(made, target)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("alike", torch.from_numpy(self.weight.detach().numpy()))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(x @ self.weight + self.alike, target)


TAKEN = {
    "columns": Columns(),
    "buffers that stay": Statistics(changes=False),
    "pieces beside one another": Pieces(slice(0, 8), slice(8, 16)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_shares_no_memory(name: str) -> None:
    x = torch.randn(8, 8)
    with pytest.raises(ap.InvalidInput, match="shares no memory with another"):
        ap.plan(REFUSED[name](), (x, x), cluster=machines(2, 1e9, 1e-6))


@pytest.mark.parametrize("name", TAKEN)
def test_memory_that_is_shared_to_no_effect_is_fine(name: str) -> None:
    x = torch.randn(8, 8)
    assert ap.plan(TAKEN[name], (x, x), cluster=machines(2, 1e9, 1e-6)).seconds > 0
