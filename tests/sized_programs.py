"""Small programs that go other ways at other sizes; each call is compared with the plain model."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar as ap
from tests.outputs import assert_close, gradients

WIDTH = 4
LIMIT = 9  # from this length on, a program goes another way


class Sized(nn.Module):
    """Computes what its kind says, of two matrices and buffers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.other = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(32.0 * WIDTH).view(32, WIDTH).cos())
        self.dropout = nn.Dropout(0.0)
        self.scale = {length: 1.0 + (length >= LIMIT) for length in range(40)}

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self, x).square().mean()


class _Doubled(torch.autograd.Function):
    """Has another gradient than its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


@functools.lru_cache
def _places(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64)


def _by_isinstance(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * 2 if type(x.shape[1]) is int and x.shape[1] >= LIMIT else m.up(x)


def _by_name(m: Sized, x: Tensor) -> Tensor:
    return getattr(m, {"9": "other", "12": "other"}.get(f"{x.shape[1]}", "up"))(x)


def _by_item(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * (torch.arange(x.shape[1]).sum().item() > LIMIT)


def _by_item_of_constant(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * torch.tensor(x.shape[1] >= LIMIT).item()


def _of_degree_3(m: Sized, x: Tensor) -> Tensor:
    n = x.shape[1]  # on a line at 4, 5 and 6
    return m.up(x) * ((n - 4) * (n - 5) * (n - 6) + n)


def _in_eval(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    return y if m.training or x.shape[1] < LIMIT else y + m.other(x)


def _truth(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * (x.shape[1] > 5)


def _no_grad(m: Sized, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.shape[1] < LIMIT):
        y = m.up(x)
    return y + m.other(x)


def _own_gradient(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    return _Doubled.apply(y) if x.shape[1] >= LIMIT else y * 1.0


def _caught(m: Sized, x: Tensor) -> Tensor:
    try:
        return m.up(x) + m.table[x.shape[1] + 20]
    except IndexError:
        return m.other(x)


def _cached(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * _places(x.shape[1])[:, None]


def _list_of_sizes(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * torch.tensor([float(x.shape[1] >= LIMIT), 1.0, 2.0, 3.0])


def _clamped(m: Sized, x: Tensor) -> Tensor:
    return m.up(x)[:, : min(x.shape[1], LIMIT)]


def _strided(m: Sized, x: Tensor) -> Tensor:
    return m.up(x)[:, :: 1 + x.shape[1] // LIMIT]


def _repeated(m: Sized, x: Tensor) -> Tensor:
    for _ in range(1 + x.shape[1] // 5):
        x = m.up(x).tanh()
    return x


def _dict_of_sizes(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * m.scale[x.shape[1]]


def _root(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * math.sqrt(x.shape[1])


def _power(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * 2 ** (x.shape[1] - 5) / x.shape[1]


def _remainder(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) + x.shape[1] % 7


def _bits(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * (x.shape[1] & 1) + m.other(x)


def _string(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * len(str(x.shape[1]))


def _window(m: Sized, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    far = places[:, None] - places
    y = m.up(x)[:, None]
    return F.scaled_dot_product_attention(y, y, y, (far >= 0) & (far < LIMIT))


def _blocks(m: Sized, x: Tensor) -> Tensor:
    y = F.pad(m.up(x), (0, 0, 0, -x.shape[1] % 4))
    return y.unflatten(1, (-1, 4)).mean(2)


def _halves(m: Sized, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return torch.cat([m.up(x[:, :half]), m.other(x[:, half:])], 1)


def _square(m: Sized, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return (mask / mask.sum(1, keepdim=True)) @ m.up(x)


def _in_place(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    y[:, x.shape[1] // 2 :] *= 3
    return y.add_(1.0)


def _relu_in_place(m: Sized, x: Tensor) -> Tensor:
    return F.relu(m.up(x), inplace=True) + x.shape[1]


def _history(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    return y * 2 if y.requires_grad and x.shape[1] >= LIMIT else y


def _iterated(m: Sized, x: Tensor) -> Tensor:
    return torch.stack([m.up(one) * at for at, one in enumerate(x.unbind(0))])


def _rows(m: Sized, x: Tensor) -> Tensor:
    return sum(m.up(row) for row in x.transpose(0, 1))  # type: ignore[return-value]


def _einsum(m: Sized, x: Tensor) -> Tensor:
    return torch.einsum("bnd,bmd->bnm", m.up(x), x).softmax(-1) @ x


def _dropped(m: Sized, x: Tensor) -> Tensor:
    return m.dropout(m.up(x))


def _checkpointed(m: Sized, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(m.up, x, use_reentrant=False)
    return y.tanh() / x.shape[1]


def _embedded(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) + m.table[: x.shape[1]] + m.table[torch.arange(x.shape[1]).flip(0)]


def _interpolated(m: Sized, x: Tensor) -> Tensor:
    return F.interpolate(m.up(x).transpose(1, 2), scale_factor=1.5, mode="linear")


def _pooled(m: Sized, x: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d(m.up(x).transpose(1, 2), 2)


def _convolved(m: Sized, x: Tensor) -> Tensor:
    return F.conv1d(m.up(x).transpose(1, 2), m.other.weight[:, :, None].repeat(1, 1, 3), padding=1)


def _strided_convolution(m: Sized, x: Tensor) -> Tensor:
    return F.conv1d(m.up(x).transpose(1, 2), m.other.weight[:, :, None], stride=2)


def _cast(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    return y if x.shape[1] < LIMIT else y.float().double()


def _rolled(m: Sized, x: Tensor) -> Tensor:
    return m.up(x).roll(x.shape[1] // 3, 1) * m.table[: x.shape[1]]


def _top(m: Sized, x: Tensor) -> Tensor:
    return m.up(x).topk(max(1, x.shape[1] // 4), 1).values


def _sorted(m: Sized, x: Tensor) -> Tensor:
    y, places = m.up(x).sort(1)
    return y + m.other(x).gather(1, places)


def _folded(m: Sized, x: Tensor) -> Tensor:
    return m.up(x.flatten(0, 1)).view(x.shape[0], -1) / x.numel()


def _identity(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) if x.shape[1] != x.shape[0] else m.other(x)


def _class_of_size(m: Sized, x: Tensor) -> Tensor:
    pair = namedtuple("pair", ["a", "b"])(x.shape[1], 2)
    return m.up(x) * max(*pair) / pair.a


def _variance(m: Sized, x: Tensor) -> Tensor:
    return m.up(x).var(1, correction=min(1, x.shape[1] - 1))


def _detached(m: Sized, x: Tensor) -> Tensor:
    y = m.up(x)
    return y + (m.other(x).detach() if x.shape[1] >= LIMIT else m.other(x))


def _autocast(m: Sized, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=x.shape[1] >= 30):
        return m.up(x) * x.shape[1]


def _exponent_of_two(m: Sized, x: Tensor) -> Tensor:
    return m.up(x) * (1 << (x.shape[1].bit_length()))


LOG: list[int] = []


class Logging(nn.Module):
    """Leaves something behind at long lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] >= LIMIT:
            LOG.append(x.shape[1])
        return self.up(x).square().mean()


KINDS: dict[str, Callable[[Sized, Tensor], Tensor]] = {
    name.removeprefix("_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and name.islower() and name != "_places"
}
LENGTHS = (4, 5, 6, 8, 7, 9, 12, 3, 11, 2, 1, 15)


def inputs_of(length: int, batch: int = 2) -> Tensor:
    return (
        torch.arange(float(batch * length * WIDTH), dtype=torch.float64)
        .view(batch, length, WIDTH)
        .sin()
    )


def computes_at_every_length(
    kind: str,
    lengths: Sequence[int] = LENGTHS,
    modes: Sequence[bool] = (True, False, True),
    **options: Any,
) -> ap.ParallelModule:
    """Losses and gradients are those of the model, in these modes (of training) in turn."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sized(kind).double()
    first = inputs_of(lengths[0])
    module = ap.parallelize(copy.deepcopy(model), (first,), **options)
    for is_training in modes:
        for each in (model, module):
            each.train(is_training)
        for length in lengths:
            x = inputs_of(length)
            for each in (model, module):
                each.zero_grad()
            loss = model(x)
            loss.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of many programs
                assert_close(module.step(x), loss.detach())
            assert_close(module.full_grads(), gradients(model))
    return module
