"""Draws: random numbers that depend on an element's place in the whole tensor, and on no layout.

    y = dropout(x, key, place, p)

`key` holds two whole numbers: the key of a step, which seed and step give, and the number of the
micro-batch. `place` says what is drawn: the number of the operator among those that draw, the shape
of all that is drawn for a whole batch, and where the piece at hand starts. So a piece is equal, bit
for bit, to that part of the whole, on every mesh, in micro-batches, and where it is made again.

The generator is a hash of that place. All dims but the last give the number of a row, which goes
through 64 bits with the key and the operator's number inside, once a row; the columns of a row go
through three rounds of 32 bits, between which the other half of the row's bits comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 2**16  # elements: on a host, what stays in a cache through all rounds
_ALPHA = -1.7580993408473766  # what SELU makes of minus infinity


def _signed(value: int, bits: int) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)))
_COLUMN, *_ROUNDS = (
    _signed(number, 32) for number in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
)
_SHIFTS = (15, 13, 16)


class Place(NamedTuple):
    """What an operator draws. Those of a program's operators look alike, but for what they draw."""

    number: int
    shape: tuple[int, ...]
    starts: tuple[int, ...] = ()  # of the piece, in the dims that are cut
    batch: tuple[int, int] | None = None  # the dim that micro-batches cut, and the size of one

    def __repr__(self) -> str:
        return f"drawn{list(self.shape)}"

    def in_batches(self, dim: int, count: int) -> Place:
        """Of one of several micro-batches, which cut a dim."""
        size = self.shape[dim] if dim < len(self.shape) else 1
        return self._replace(batch=(dim, size // count)) if size > 1 else self

    def unflattened(self, dim: int, inner: int) -> Place:
        """The same of a dim taken apart, of which pieces are cut in the outer part."""
        starts = self.starts + (0,) * (len(self.shape) - len(self.starts))
        return self._replace(
            shape=(*self.shape[:dim], self.shape[dim] // inner, inner, *self.shape[dim + 1 :]),
            starts=(*starts[:dim], starts[dim] // inner, 0, *starts[dim + 1 :]),
        )


def _mixed(x: Any) -> Any:
    """64 bits, of a number or of tensors of them, each of which depends on all that it is given."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
        x = x if isinstance(x, Tensor) else _signed(x, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _rows_and_columns(
    key: Tensor, place: Place, shape: Sequence[int], stream: int
) -> tuple[Tensor, Tensor]:
    """The hashes of the rows of a piece, and the numbers of its columns."""
    starts = place.starts + (0,) * (len(shape) - len(place.starts))
    row, stride = torch.zeros((), dtype=torch.int64, device=key.device), 1
    columns = row
    for dim in reversed(range(len(shape))):
        index = torch.arange(starts[dim], starts[dim] + shape[dim], device=key.device)
        if place.batch is not None and place.batch[0] == dim:
            index = index + key[1] * place.batch[1]
        if dim == len(shape) - 1:
            columns = index
            continue
        row = (index * stride).view(-1, *[1] * row.ndim) + row
        stride *= place.shape[dim]
    own = _mixed(_signed((2 * place.number + 1) * _GOLDEN + stream, 64))
    return _mixed((row.reshape(-1) * _GOLDEN + key[0]) ^ own), (columns * _COLUMN).int()


def _hashed(rows: Tensor, columns: Tensor) -> Tensor:
    """32 random bits for every column of every row."""
    low, high = rows.int().unsqueeze(-1), (rows >> 32).int().unsqueeze(-1)
    x = columns ^ low
    for number, (factor, shift) in enumerate(zip(_ROUNDS, _SHIFTS)):
        x.mul_(factor)
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if number == 0:
            x.bitwise_xor_(high)
    return x


def _drawn(
    key: Tensor,
    place: Place,
    shape: Sequence[int],
    made: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    stream: int = 0,
) -> Tensor:
    """What `made` makes of the bits of a piece of a shape."""
    with torch.no_grad():
        sizes = [*shape] or [1]
        rows, columns = _rows_and_columns(key, place, sizes, stream)
        if key.device.type != "cpu" or torch.compiler.is_compiling():
            return made(_hashed(rows, columns)).to(dtype).view(shape)
        found = torch.empty(len(rows), sizes[-1], dtype=dtype)
        count = max(1, _CHUNK // max(sizes[-1], 1))
        for part, into in zip(rows.split(count), found.split(count)):
            into.copy_(made(_hashed(part, columns)))
        return found.view(shape)


def kept(key: Tensor, place: Place, shape: Sequence[int], p: float) -> Tensor:
    """True with a probability of 1 - p."""
    least = round(p * 2**32) - 2**31
    if least > 2**31 - 1:
        return torch.zeros(*shape, dtype=torch.bool, device=key.device)
    return _drawn(key, place, shape, lambda bits: bits >= least, torch.bool)


def uniform(
    key: Tensor, place: Place, shape: Sequence[int], dtype: torch.dtype, stream: int = 0
) -> Tensor:
    """Numbers from 0 to below 1, as fine as the dtype has them there."""
    digits = min(round(-math.log2(torch.finfo(dtype).eps)) + 1, 53)

    def high(bits: Tensor) -> Tensor:
        return ((bits >> (32 - digits)) & (2**digits - 1)) * 2.0**-digits

    if digits <= 32:
        return _drawn(key, place, shape, high, dtype, stream)
    first, second = (
        _drawn(key, place, shape, lambda bits: bits, torch.int32, stream + number)
        for number in (0, 1)
    )
    whole = (first.long() & (2**32 - 1)) << (digits - 32)
    return (whole | ((second.long() & (2**32 - 1)) >> (64 - digits))).to(dtype) * 2.0**-digits


def normal(key: Tensor, place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of mean 0 and variance 1."""
    wide = torch.promote_types(dtype, torch.float32)
    radius = uniform(key, place, shape, wide, 2)
    angle = uniform(key, place, shape, wide, 4)
    return ((-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)


def dropout(input: Tensor, key: Tensor, place: Place, p: float) -> Tensor:
    """`input` with a part p of its elements 0, the others larger by as much as that takes away."""
    return torch.where(kept(key, place, input.shape, p), input * _scale(p), 0.0)


def _of_features(input: Tensor) -> list[int]:
    return [*input.shape[:2], *[1] * (input.ndim - 2)]


def feature_dropout(input: Tensor, key: Tensor, place: Place, p: float) -> Tensor:
    """The same of whole channels."""
    return torch.where(kept(key, place, _of_features(input), p), input * _scale(p), 0.0)


def _like_selu(input: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2)) if p < 1 else 0.0
    shift = -scale * p * _ALPHA
    return torch.where(mask, input * scale + shift, _ALPHA * scale + shift)


def alpha_dropout(input: Tensor, key: Tensor, place: Place, p: float) -> Tensor:
    """Dropout that leaves mean and variance of what SELU gives as they are."""
    return _like_selu(input, kept(key, place, input.shape, p), p)


def feature_alpha_dropout(input: Tensor, key: Tensor, place: Place, p: float) -> Tensor:
    """The same of whole channels."""
    return _like_selu(input, kept(key, place, _of_features(input), p), p)


def rrelu(input: Tensor, key: Tensor, place: Place, lower: float, upper: float) -> Tensor:
    """Where `input` is negative it is taken times a slope between two."""
    slope = uniform(key, place, input.shape, input.dtype) * (upper - lower) + lower
    return torch.where(input > 0, input, input * slope)


def bernoulli(input: Tensor, key: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """1 with the probabilities of `input`, else 0; no gradient flows."""
    numbers = uniform(key, place, input.shape, torch.promote_types(input.dtype, torch.float32))
    found = (numbers < input.detach()).to(dtype)
    return found + 0 * input if input.requires_grad else found


def chosen(input: Tensor, key: Tensor, place: Place, p: float, dtype: torch.dtype) -> Tensor:
    """1 with a probability for every element of `input`, else 0."""
    return kept(key, place, input.shape, 1 - p).to(dtype)


def uniform_like(
    input: Tensor, key: Tensor, place: Place, low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """A number between two for every element of `input`."""
    return uniform(key, place, input.shape, dtype) * (high - low) + low


def normal_like(
    input: Tensor, key: Tensor, place: Place, mean: float, std: float, dtype: torch.dtype
) -> Tensor:
    """The same of a normal distribution."""
    return normal(key, place, input.shape, dtype) * std + mean


def whole_like(
    input: Tensor, key: Tensor, place: Place, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """A whole number from `low` to below `high` for every element of `input`."""
    numbers = uniform(key, place, input.shape, torch.float64)
    return (numbers * (high - low)).floor().add_(low).to(dtype)


def permutation(input: Tensor, key: Tensor, place: Place) -> Tensor:
    """The places of the elements of a row in a random order."""
    return uniform(key, place, input.shape, torch.float64).argsort().to(input.dtype)


def multinomial(input: Tensor, key: Tensor, place: Place, count: int, replacement: bool) -> Tensor:
    """Of each row of weights, which are drawn; each once, or put back each time."""
    weights = input.detach().double()
    if replacement:
        shape = (*input.shape[:-1], count)
        own = place._replace(shape=(*place.shape[:-1], count))
        points = uniform(key, own, shape, torch.float64) * weights.sum(-1, keepdim=True)
        return torch.searchsorted(weights.cumsum(-1), points, right=True)
    ages = -(1 - uniform(key, place, input.shape, torch.float64)).log() / weights
    return ages.topk(count, -1, largest=False).indices


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    drawn: Tensor,
    place: Place,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot product attention, whose weights are dropped by the key `drawn`."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    if is_grouped:
        groups = key.shape[-3], query.shape[-3] // key.shape[-3]
        query, key, value = query.unflatten(-3, groups), key.unsqueeze(-3), value.unsqueeze(-3)
        if attn_mask is not None and attn_mask.ndim > 2:
            is_each = attn_mask.shape[-3] > 1
            attn_mask = attn_mask.unflatten(-3, groups) if is_each else attn_mask.unsqueeze(-3)
        place = place.unflattened(len(place.shape) - 3, groups[1])
    heads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (x.expand(*heads, *x.shape[-2:]) for x in (query, key, value))
    rows = _Rows(place, dropout_p, is_causal, scale)
    found = _Attention.apply(query, key, value, attn_mask, drawn, rows)
    return found.flatten(-4, -3) if is_grouped else found


_SCORES = 2**20  # of attention, at a time


class _Attention(torch.autograd.Function):
    """A few rows of the weights at a time, which backward makes again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        rows: _Rows,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, drawn)
        ctx.rows = rows
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for start, count in rows.parts(query, key):
            _, weights, noise = rows.weights(query, key, mask, drawn, start, count)
            out.narrow(-2, start, count).copy_((weights * noise).to(value.dtype) @ value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, drawn = ctx.saved_tensors
        rows, scale = ctx.rows, ctx.rows.scale
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        of_mask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        for start, count in rows.parts(query, key):
            part, weights, noise = rows.weights(query, key, mask, drawn, start, count)
            above = grad.narrow(-2, start, count)
            of_value += (weights * noise).to(value.dtype).transpose(-2, -1) @ above
            of_weights = (above @ value.transpose(-2, -1)).to(weights.dtype) * noise
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
            if of_mask is not None:
                shape = of_mask.narrow(-2, start, count) if of_mask.shape[-2] > 1 else of_mask
                shape += of_scores.to(of_mask.dtype).sum_to_size(shape.shape)
            of_scores = of_scores.to(query.dtype) * scale
            of_query.narrow(-2, start, count).copy_(of_scores @ key)
            of_key += of_scores.transpose(-2, -1) @ part
        return of_query, of_key, of_value, of_mask, None, None


@dataclass(frozen=True)
class _Rows:
    """The weights of attention, some rows at a time."""

    place: Place
    p: float
    is_causal: bool
    scale: float

    def parts(self, query: Tensor, key: Tensor) -> Iterator[tuple[int, int]]:
        """Where they start, and how many there are."""
        total = query.shape[-2]
        most = max(1, _SCORES // max(1, math.prod(query.shape[:-2]) * key.shape[-2]))
        for start in range(0, total, most):
            yield start, min(most, total - start)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        start: int,
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of the queries, their weights, and what dropout takes these times."""
        part = query.narrow(-2, start, count)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (part @ key.transpose(-2, -1)).to(wide).mul_(self.scale)
        place = self.place
        starts = place.starts + (0,) * (scores.ndim - len(place.starts))
        first = starts[-2] + start
        if mask is not None:
            own = mask.narrow(-2, start, count) if mask.shape[-2] > 1 else mask
            is_bool = own.dtype == torch.bool
            scores = scores.masked_fill_(~own, -math.inf) if is_bool else scores + own
        if self.is_causal:
            seen = torch.arange(first, first + count, device=query.device).unsqueeze(-1)
            scores.masked_fill_(torch.arange(key.shape[-2], device=query.device) > seen, -math.inf)
        weights = scores.softmax(-1)
        if mask is not None:  # rows that see nothing
            weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
        own_place = place._replace(starts=(*starts[:-2], first, starts[-1]))
        noise = kept(drawn, own_place, weights.shape, self.p).to(wide) * _scale(self.p)
        return part, weights, noise


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0
