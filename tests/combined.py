"""Weights that are made of several parameters, to which backward hands one tensor, or its pieces.

>>> weight = COMBINATIONS["stack"](a, b)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from autopar._torch.tensors import local_of
from tests.models import Case

# Of two square matrices a third one, whose gradient is theirs, or of which they have pieces.
COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "stack": lambda a, b: torch.stack([a, b]).sum(0),
    "average": lambda a, b: torch.stack([a, b]).mean(0),
    "halves": lambda a, b: torch.cat([a[: len(a) // 2], b[len(a) // 2 :]]),
    "wide": lambda a, b: torch.cat([a, b], 1)[:, 1 : len(a) + 1],
    "transposed": lambda a, b: a + b.t(),
    "views": lambda a, b: (a.flatten() + b.flatten()).view_as(a),
    "delta": lambda a, b: a.detach() + a + b[:, :2] @ b[:2],
    "product": lambda a, b: a * b,
}


class Combined(nn.Module):
    """A layer whose weight is combined of two parameters."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.left, self.right = (nn.Parameter(0.3 * torch.randn(size, size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ COMBINATIONS[self.name](self.left, self.right))


class AllCombined(nn.Module):
    """A layer for each combination."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Combined(name, size) for name in COMBINATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def combined(size: int = 12, batch: int = 8) -> Case:
    """One case that all who ask read, and none changes."""
    random = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AllCombined(size).double()
    return Case("combined", model, (torch.randn(batch, size, generator=random).double(),))


def accumulate(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of a loss to those of parameters, each in memory of its own, as
    `loss.backward()` should: torch adds twice to memory that leaves share."""
    learning = [p for p in parameters if p.requires_grad]
    for parameter, grad in zip(learning, torch.autograd.grad(loss, learning, allow_unused=True)):
        if grad is not None:
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad


def assert_own_memory(parameters: Iterable[nn.Parameter]) -> None:
    """No two of their gradients share bytes."""
    pieces = [local_of(p.grad) for p in parameters if p.grad is not None]
    spans = sorted((piece.data_ptr(), piece.nbytes) for piece in pieces if piece.nbytes)
    for (start, length), (following, _) in pairwise(spans):
        assert start + length <= following, "two gradients share memory"
