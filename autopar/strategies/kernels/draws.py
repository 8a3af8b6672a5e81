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


def _rows(key: Tensor, place: Place, shape: Sequence[int], stream: int) -> Tensor:
    """The hashes of the rows of a piece."""
    index = _numbers(place, shape, key.device)
    if place.batch is not None and place.batch[0] < len(shape) - 1:
        index = index + key[1] * (place.batch[1] * math.prod(place.shape[place.batch[0] + 1 : -1]))
    own = _mixed(_signed((2 * place.number + 1) * _GOLDEN + stream, 64))
    return _mixed(torch.add(key[0], index, alpha=_GOLDEN).bitwise_xor_(own))


def _numbers(place: Place, shape: Sequence[int], device: torch.device) -> Tensor:
    """Those of the rows of a piece in the whole."""
    starts = place.starts + (0,) * (len(shape) - len(place.starts))
    last = len(shape) - 1
    if tuple(shape[1:last]) == place.shape[1:last]:  # one after another
        first = starts[0] * math.prod(place.shape[1:last]) if last else 0
        return torch.arange(first, first + math.prod(shape[:last]), device=device)
    numbers, stride = torch.zeros(1, dtype=torch.int64, device=device), 1
    for dim in reversed(range(last)):
        index = torch.arange(starts[dim], starts[dim] + shape[dim], device=device) * stride
        numbers = (index.unsqueeze(-1) + numbers).view(-1)
        stride *= place.shape[dim]
    return numbers


def _columns(key: Tensor, place: Place, shape: Sequence[int]) -> Tensor:
    """The numbers of the columns of a piece, far from one another."""
    last = len(shape) - 1
    start = place.starts[last] if len(place.starts) > last else 0
    columns = torch.arange(start, start + shape[last], device=key.device)
    if place.batch is not None and place.batch[0] == last:
        columns = columns + key[1] * place.batch[1]
    return (columns * _COLUMN).int()


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
        rows, columns = _rows(key, place, sizes, stream), _columns(key, place, sizes)
        return _made(rows, columns, made, dtype).view(shape)


def _made(
    rows: Tensor, columns: Tensor, made: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """The same of the bits of all columns of rows: on a host of a few at a time."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return made(_hashed(rows, columns)).to(dtype)
    found = torch.empty(len(rows), len(columns), dtype=dtype)
    count = max(1, _CHUNK // max(len(columns), 1))
    for part, into in zip(rows.split(count), found.split(count)):
        into.copy_(made(_hashed(part, columns)))
    return found


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
    weights = _Weights(place, dropout_p, is_causal, scale)
    found = _Attention.apply(query, key, value, attn_mask, drawn, weights)
    return found.flatten(-4, -3) if is_grouped else found


_SCORES = 2**20  # of attention, at a time
_ROWS = 256  # of a head at a time, where what they see grows from row to row


class _Attention(torch.autograd.Function):
    """Some rows of the weights at a time, which backward makes again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        weights: _Weights,
    ) -> Tensor:
        heads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        out = query.new_empty(*heads, query.shape[-2], value.shape[-1])
        flat = out.view(-1, *out.shape[-2:])
        for part in weights.parts(query, key, value, mask, drawn, heads):
            kept = part.weights.masked_fill_(part.dropped, 0.0).to(value.dtype)
            flat[part.heads, part.rows] = torch.bmm(kept, part.value).mul_(_scale(weights.p))
        ctx.save_for_backward(query, key, value, mask, drawn, out)
        ctx.weights = weights
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, drawn, out = ctx.saved_tensors
        weights, heads = ctx.weights, out.shape[:-2]
        of_query, of_key, of_value = (
            x.new_zeros(math.prod(heads), *x.shape[-2:]) for x in (query, key, value)
        )
        of_mask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        shared = (grad * out).sum(-1, keepdim=True).reshape(-1, grad.shape[-2], 1)
        slopes = (grad * _scale(weights.p)).reshape(-1, *grad.shape[-2:])
        for part in weights.parts(query, key, value, mask, drawn, heads):
            slope, keys = slopes[part.heads, part.rows], part.key.shape[-2]
            wide = part.weights.dtype
            kept = part.weights.masked_fill(part.dropped, 0.0).to(value.dtype)
            of_value[part.heads, :keys] += torch.bmm(kept.transpose(1, 2), slope)
            of_scores = torch.bmm(slope, part.value.transpose(1, 2)).to(wide)
            of_scores.masked_fill_(part.dropped, 0.0).sub_(shared[part.heads, part.rows])
            of_scores.mul_(part.weights)
            if of_mask is not None:
                own = _own(of_mask, heads, part.heads.start, part.rows)[..., :keys]
                own += of_scores.to(own.dtype).sum_to_size(own.shape)
            of_scores = of_scores.to(query.dtype)
            of_query[part.heads, part.rows] = torch.bmm(of_scores, part.key)
            of_key[part.heads, :keys] += torch.bmm(of_scores.transpose(1, 2), part.query)
        of_query.mul_(weights.scale)
        given = zip((of_query, of_key, of_value), (query, key, value))
        sums = (found.view(*heads, *found.shape[1:]).sum_to_size(x.shape) for found, x in given)
        return *sums, of_mask, None, None


@dataclass(frozen=True)
class _Part:
    """Some rows of some heads."""

    heads: slice
    rows: slice
    query: Tensor  # scaled
    key: Tensor  # those that are seen
    value: Tensor
    weights: Tensor  # as softmax gives them
    dropped: Tensor


@dataclass(frozen=True)
class _Weights:
    """The weights of attention, some rows at a time."""

    place: Place
    p: float
    is_causal: bool
    scale: float

    def parts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drawn: Tensor,
        heads: Sequence[int],
    ) -> Iterator[_Part]:
        """All of them."""
        queries, keys = query.shape[-2], key.shape[-2]
        query, key, value = (
            x.expand(*heads, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (query, key, value)
        )
        place, shape = self.place, (*heads, queries, keys)
        first = place.starts[len(heads)] if len(place.starts) > len(heads) else 0
        hashes = _rows(drawn, place, shape, 0).view(-1, queries)
        columns, numbers = _columns(drawn, place, shape), torch.arange(keys, device=key.device)
        most = max(round(self.p * 2**32) - 1, 0) - 2**31

        def is_less(bits: Tensor) -> Tensor:
            return bits <= most

        rows = min(queries, _ROWS if self.is_causal else max(1, _SCORES // max(keys, 1)))
        many = max(1, _SCORES // max(rows * keys, 1)) if mask is None or mask.ndim == 2 else 1
        wide = torch.promote_types(query.dtype, torch.float32)
        for head in range(0, len(query), many):
            for row in range(0, queries, rows):
                at, of = slice(head, head + many), slice(row, min(row + rows, queries))
                seen = min(keys, first + of.stop) if self.is_causal else keys
                part = query[at, of] * self.scale
                scores = torch.bmm(part, key[at, :seen].transpose(1, 2)).to(wide)
                scores = _masked(scores, mask, heads, head, of)
                if self.is_causal:
                    own = torch.arange(first + of.start, first + of.stop, device=query.device)
                    scores.masked_fill_(numbers[:seen] > own.unsqueeze(-1), -math.inf)
                weights = scores.softmax(-1)
                if mask is not None:  # rows that see nothing
                    weights.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
                dropped = _made(hashes[at, of].reshape(-1), columns[:seen], is_less, torch.bool)
                dropped = dropped.view(weights.shape)
                yield _Part(at, of, part, key[at, :seen], value[at, :seen], weights, dropped)


def _masked(
    scores: Tensor, mask: Tensor | None, heads: Sequence[int], head: int, rows: slice
) -> Tensor:
    """Scores of rows of a head, or of several where all have one mask, with what masks them."""
    if mask is None:
        return scores
    own = _own(mask, heads, head, rows)
    return scores.masked_fill_(~own, -math.inf) if own.dtype == torch.bool else scores.add_(own)


def _own(mask: Tensor, heads: Sequence[int], head: int, rows: slice) -> Tensor:
    """What a mask has for rows of a head; a view."""
    if mask.ndim > 2:
        mask = mask.expand(*heads, *mask.shape[-2:])
        for dim in range(len(heads)):
            inner = math.prod(heads[dim + 1 :])
            mask, head = mask[head // inner], head % inner
    return mask[rows] if mask.shape[-2] > 1 else mask


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0
