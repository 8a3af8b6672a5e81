"""autograd.Functions as people write them, and which dims of them may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.T @ x


class Biased(Function):
    """A sum over pieces would add the bias for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.T @ x, slope.sum(0)


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.5 * x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.5 * x)
        return slope * (gate + 1.5 * x * gate * (1 - gate))


class Gated(Function):
    """Two arguments, two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gate)
        return x * gate.tanh(), x + gate

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        value = gate.tanh()
        return one * value + other, one * x * (1 - value * value) + other


class Attention(Function):
    """Kernel attention with masks, batch and heads as one dim."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        weights = (query @ key.transpose(-1, -2)).exp() * mask[:, None, :]
        ctx.save_for_backward(query, key, value, weights)
        return weights @ value

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        query, key, value, weights = ctx.saved_tensors
        scores = (slope @ value.transpose(-1, -2)) * weights
        return (
            scores @ key,
            scores.transpose(-1, -2) @ query,
            weights.transpose(-1, -2) @ slope,
            None,
        )


class Heads(Function):
    """What merges two dims, and takes one apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = b, n, d = x.shape
        return 2 * x.view(b, n, 2, d // 2).transpose(1, 2).reshape(b * 2, n, d // 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        b, n, d = ctx.shape
        return 2 * slope.view(b, 2, n, d // 2).transpose(1, 2).reshape(b, n, d)


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (slope - (y * slope).sum(-1, keepdim=True))


class Centred(Function):
    """Divides by the number of rows that it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.sum(0) / x.shape[0]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope - slope.sum(0) / slope.shape[0]


class Averaged(Function):
    """Its gradient is that of a mean over rows, which forward does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 2 / ctx.rows


class Counted(Function):
    """Scales by all elements, known as a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = x.numel()
        return x * ctx.count**-0.5

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * ctx.count**-0.5


class Placed(Function):
    """Adds to each row its number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        rows = torch.arange(slope.shape[0], dtype=slope.dtype, device=slope.device)
        return slope * rows[:, None]


class First(Function):
    """The first rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x[:2] * 1.0

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return torch.cat([slope, slope.new_zeros(ctx.rows - 2, slope.shape[1])])


class Summed(Function):
    """A gradient that is the same for every piece is no part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return slope, torch.ones_like(slope[0])


class Large(Function):
    """Another operator where there are many rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone() if x.shape[0] > 1 else x * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.clone() if slope.shape[0] > 1 else slope * 2


class Written(Function):
    """Writes to values of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2.0)
        y[:, 0] = 1.0
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        slope = slope * 2.0
        slope[:, 0] = 0.0
        return slope


class Tensored(Function):
    """Divides by the number of rows, as a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x / torch.tensor(float(ctx.rows))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope / torch.tensor(float(ctx.rows))


class Reversed(Function):
    """Itself, with its gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return -0.5 * slope


@dataclass(frozen=True)
class FunctionCase:
    """A Function, the shapes of what it is given, and the (argument, dim) that may be cut."""

    function: type[Function]
    shapes: tuple[tuple[int, ...], ...]
    cut: frozenset[tuple[int, int]]


def _case(function: type[Function], *shapes: tuple[int, ...], cut: str) -> FunctionCase:
    places = (tuple(map(int, pair)) for pair in cut.split())
    return FunctionCase(function, shapes, frozenset(places))  # type: ignore[arg-type]


CASES = [
    _case(Linear, (6, 4), (8, 4), cut="00 01 10 11"),
    _case(Biased, (6, 4), (8, 4), (8,), cut="00 10 20"),
    _case(Swish, (6, 4), cut="00 01"),
    _case(Swish, (2, 5, 3), cut="00 01 02"),
    _case(Gated, (6, 4), (6, 4), cut="00 01 10 11"),
    _case(Attention, (4, 5, 3), (4, 6, 3), (4, 6, 2), (4, 6), cut="00 10 20 30 01 11 21 31 22"),
    _case(Heads, (4, 5, 6), cut="00 01"),
    _case(Softmax, (6, 4), cut="00"),
    _case(Centred, (6, 4), cut="01"),
    _case(Averaged, (6, 4), cut="01"),
    _case(Averaged, (2, 4), cut="01"),
    _case(Counted, (6, 4), cut=""),
    _case(Placed, (6, 4), cut="01"),
    _case(First, (6, 4), cut=""),
    _case(Summed, (6, 4), (4,), cut="01 10"),
    _case(Written, (6, 4), cut="00"),
    _case(Tensored, (6, 4), cut="01"),
    _case(Reversed, (6, 4), cut="00 01"),
    _case(Large, (6, 4), cut="01"),
]
