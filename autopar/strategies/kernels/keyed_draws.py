"""Keyed draws: random numbers that depend on an element's place in the whole, not on layouts.

    y = dropout(x, key, place, p)

`key` holds two integers: the key of a step, which seed and step give, and the micro-batch's number.
A piece is equal, bit for bit, to that part of the whole on every mesh, also if it is recomputed.

The generator is a hash of the place. All dims but the last give the number of a row, which goes
through 64 bits with the key and the operator's number, once a row; the columns of a row go through
three rounds of 32 bits, between which the other half of the row's bits comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import InvalidInput

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


class DrawPlace(NamedTuple):
    """The place of a draw: which operator draws, the whole of a batch, and the piece of it."""

    number: int | Tensor  # a tensor where programs of several operators are one
    shape: tuple[int, ...]
    starts: tuple[int, ...] = ()  # of the piece, in the dims that are cut
    batch: tuple[int, int] | None = None  # the dim that micro-batches cut, and the size of one
    slices: int = 1  # of the batch: micro-batch i is the i-th part of each
    parts: tuple[int, ...] = ()  # of each dim: the piece has one piece of each part, from its start
    sliced: tuple[int, int] | None = None  # the dim of tokens, and where a slice of them begins

    def __repr__(self) -> str:
        start = f" from {list(self.starts)}" if any(self.starts) else ""
        return f"draw {self.number} of {list(self.shape)}{start}"

    def in_batches(self, dim: int, count: int, parts: int = 1) -> DrawPlace:
        """Return the place of a micro-batch, `count` of which cut a dim, or each of its `parts`."""
        size = self.shape[dim] if dim < len(self.shape) else 1
        return self._replace(batch=(dim, size // count), slices=parts) if size > 1 else self

    def unflattened(self, dim: int, inner: int) -> DrawPlace:
        """Return the place with a dim taken apart, whose pieces are cut in the outer part."""
        starts, batch = self.starts + (0,) * (len(self.shape) - len(self.starts)), self.batch
        if batch is not None and batch[0] >= dim:
            batch = (dim, batch[1] // inner) if batch[0] == dim else (batch[0] + 1, batch[1])
        return self._replace(
            shape=(*self.shape[:dim], self.shape[dim] // inner, inner, *self.shape[dim + 1 :]),
            starts=(*starts[:dim], starts[dim] // inner, 0, *starts[dim + 1 :]),
            batch=batch,
            parts=(*self.parts[: dim + 1], 1, *self.parts[dim + 1 :]) if self.parts else (),
        )


def element_numbers(key: Tensor, place: DrawPlace, dim: int, length: int) -> Tensor:
    """Return the indices that the elements of a piece have in a dim of the whole."""
    start = place.starts[dim] if len(place.starts) > dim else 0
    parts = place.parts[dim] if len(place.parts) > dim else 1
    size, is_batch = place.shape[dim], place.batch is not None and place.batch[0] == dim
    if place.batch is not None and is_batch:
        size = place.batch[1]
    numbers = torch.arange(length, device=key.device)
    numbers = start + _spread(numbers, length // parts, size // parts)
    if is_batch:
        part = size // place.slices
        numbers = _spread(numbers, part, place.shape[dim] // place.slices) + key[1] * part
    return numbers


def _spread(numbers: Tensor, run: int, distance: int) -> Tensor:
    """Return indices whose runs of length `run` begin at multiples of `distance`."""
    return numbers if run == distance else numbers + numbers // max(run, 1) * (distance - run)


def _mixed(x: Any) -> Any:
    """Return 64 mixed bits of an integer, or of a tensor: each depends on all bits of x."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
        x = x if isinstance(x, Tensor) else _signed(x, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def rows_of(key: Tensor, place: DrawPlace, shape: Sequence[int], stream: int) -> Tensor:
    """Return the hashes of the rows of a piece."""
    seed = (2 * place.number + 1) * _GOLDEN + stream
    seed = _mixed(seed if isinstance(seed, Tensor) else _signed(seed, 64))
    index = _numbers(key, place, shape)
    return _mixed(torch.add(key[0], index, alpha=_GOLDEN).bitwise_xor_(seed))


def _numbers(key: Tensor, place: DrawPlace, shape: Sequence[int]) -> Tensor:
    """Return the numbers that the rows of a piece have in the whole."""
    last, batch = len(shape) - 1, place.batch
    is_one_by_one = last == 0 or shape[0] == 1 or place.shape[0] > 1
    is_one_by_one = is_one_by_one and tuple(shape[1:last]) == place.shape[1:last]
    is_one_by_one = is_one_by_one and all(parts == 1 for parts in place.parts[:last])
    if is_one_by_one and (place.slices == 1 or batch is None or batch[0] >= last):
        first = place.starts[0] * math.prod(place.shape[1:last]) if last and place.starts else 0
        numbers = torch.arange(first, first + math.prod(shape[:last]), device=key.device)
        if batch is not None and batch[0] < last:
            numbers = numbers + key[1] * (batch[1] * math.prod(place.shape[batch[0] + 1 : last]))
        return numbers
    numbers, stride = torch.zeros(1, dtype=torch.int64, device=key.device), 1
    for dim in reversed(range(last)):
        # A dim of size 1 in the whole has one draw for all of its elements.
        index = element_numbers(key, place, dim, shape[dim]) * (
            stride if place.shape[dim] > 1 else 0
        )
        numbers = (index.unsqueeze(-1) + numbers).view(-1)
        stride *= place.shape[dim]
    return numbers


def columns_of(key: Tensor, place: DrawPlace, shape: Sequence[int]) -> Tensor:
    """Return the numbers of the columns of a piece, far from one another."""
    return (element_numbers(key, place, len(shape) - 1, shape[-1]) * _COLUMN).int()


def _hashed(rows: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits for every column of every row."""
    low, high = rows.int().unsqueeze(-1), (rows >> 32).int().unsqueeze(-1)
    x = columns ^ low
    for number, (factor, shift) in enumerate(zip(_ROUNDS, _SHIFTS)):
        x.mul_(factor)
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if number == 0:
            x.bitwise_xor_(high)
    return x


def _draw(
    key: Tensor,
    place: DrawPlace,
    shape: Sequence[int],
    transform: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    stream: int = 0,
) -> Tensor:
    """Return `transform` of the random bits of a piece of a shape."""
    with torch.no_grad():
        sizes = [*shape] or [1]
        rows, columns = rows_of(key, place, sizes, stream), columns_of(key, place, sizes)
        return draw_elements(rows, columns, transform, dtype).view(shape)


def draw_elements(
    rows: Tensor, columns: Tensor, transform: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return `transform` of the random bits of rows and columns; on a host few rows at a time."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return transform(_hashed(rows, columns)).to(dtype)
    out = torch.empty(len(rows), len(columns), dtype=dtype)
    count = max(1, _CHUNK // max(len(columns), 1))
    for part, into in zip(rows.split(count), out.split(count)):
        into.copy_(transform(_hashed(part, columns)))
    return out


def keep_mask(key: Tensor, place: DrawPlace, shape: Sequence[int], p: float) -> Tensor:
    """Return a mask that is True with a probability of 1 - p."""
    least = round(p * 2**32) - 2**31
    if least > 2**31 - 1:
        return torch.zeros(*shape, dtype=torch.bool, device=key.device)
    return _draw(key, place, shape, lambda bits: bits >= least, dtype=torch.bool)


def uniform(
    key: Tensor, place: DrawPlace, shape: Sequence[int], dtype: torch.dtype, stream: int = 0
) -> Tensor:
    """Return numbers from 0 to below 1, as fine as the dtype has them there."""
    digits = min(round(-math.log2(torch.finfo(dtype).eps)) + 1, 53)

    def high(bits: Tensor) -> Tensor:
        return ((bits >> (32 - digits)) & (2**digits - 1)) * 2.0**-digits

    if digits <= 32:
        return _draw(key, place, shape, high, dtype=dtype, stream=stream)
    whole = (_long(key, place, shape, stream) >> (64 - digits)) & (2**digits - 1)
    return whole.to(dtype) * 2.0**-digits


def _long(key: Tensor, place: DrawPlace, shape: Sequence[int], stream: int) -> Tensor:
    """Return 64 random bits for every element, of two streams."""
    first, second = (
        _draw(key, place, shape, lambda bits: bits, dtype=torch.int32, stream=stream + half)
        for half in (0, 1)
    )
    return (first.long() << 32) | (second.long() & (2**32 - 1))


def normal(key: Tensor, place: DrawPlace, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return numbers of mean 0 and variance 1, shared by the parts of complex ones."""
    wide = torch.promote_types(dtype, torch.float32)
    radius = uniform(key, place, shape, wide.to_real(), 2)
    angle = 2 * math.pi * uniform(key, place, shape, wide.to_real(), 4)
    length = (-2 * (1 - radius).log()).sqrt()
    if dtype.is_complex:
        return torch.polar(length * math.sqrt(0.5), angle).to(dtype)
    return (length * angle.cos()).to(dtype)


def keep_scale(p: float) -> float:
    """Return the factor of elements that dropout keeps, which preserves the mean."""
    return 1 / (1 - p) if p < 1 else 0.0


def dropout(input: Tensor, key: Tensor, place: DrawPlace, p: float) -> Tensor:
    """Return `input` with a share p of its elements 0, and the others scaled to the same mean."""
    return torch.where(keep_mask(key, place, input.shape, p), input * keep_scale(p), 0.0)


def _feature_shape(input: Tensor) -> list[int]:
    return [*input.shape[:2], *[1] * (input.ndim - 2)]


def feature_dropout(input: Tensor, key: Tensor, place: DrawPlace, p: float) -> Tensor:
    """Return `dropout` of whole channels."""
    return torch.where(keep_mask(key, place, _feature_shape(input), p), input * keep_scale(p), 0.0)


def _alpha_masked(input: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2)) if p < 1 else 0.0
    shift = -scale * p * _ALPHA
    return torch.where(mask, input * scale + shift, _ALPHA * scale + shift)


def alpha_dropout(input: Tensor, key: Tensor, place: DrawPlace, p: float) -> Tensor:
    """Return a dropout that preserves mean and variance of SELU's outputs."""
    return _alpha_masked(input, keep_mask(key, place, input.shape, p), p)


def feature_alpha_dropout(input: Tensor, key: Tensor, place: DrawPlace, p: float) -> Tensor:
    """Return `alpha_dropout` of whole channels."""
    return _alpha_masked(input, keep_mask(key, place, _feature_shape(input), p), p)


def rrelu(input: Tensor, key: Tensor, place: DrawPlace, lower: float, upper: float) -> Tensor:
    """Return `input`, its negative elements times random slopes between two numbers."""
    slope = uniform(key, place, input.shape, input.dtype) * (upper - lower) + lower
    return torch.where(input > 0, input, input * slope)


def _require(values: Tensor, is_good: Tensor, rule: str, what: str) -> None:
    """Refuse values that torch refuses, if they are on a host: no device is waited for."""
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and not is_good.all():
        bad = values.detach()[~is_good.expand(values.shape)][0]
        raise InvalidInput(rule, got=f"{bad:.6g} for {what}", remedy="mend what it is drawn by")


def _with_zero_gradients(draws: Tensor, *inputs: object) -> Tensor:
    """Return `draws`, whose inputs get gradients of zeros, as in torch."""
    for input in inputs:
        if isinstance(input, Tensor) and input.requires_grad and draws.is_floating_point():
            draws = draws + input.reshape(-1)[:0].sum()  # of no element
    return draws


def native_dropout(input: Tensor, key: Tensor, place: DrawPlace, p: float) -> tuple[Tensor, Tensor]:
    """Return dropout, and the mask of the elements that are kept."""
    mask = keep_mask(key, place, input.shape, p)
    return torch.where(mask, input * keep_scale(p), 0.0), mask


def bernoulli(
    input: Tensor, p: Tensor | None, key: Tensor, place: DrawPlace, dtype: torch.dtype
) -> Tensor:
    """Return 1 for elements of `input` with probability `p` (None: `input` itself), else 0."""
    chances = input if p is None else p
    _require(chances, (chances >= 0) & (chances <= 1), "probabilities are from 0 to 1", "bernoulli")
    numbers = uniform(key, place, input.shape, torch.promote_types(chances.dtype, torch.float32))
    return _with_zero_gradients((numbers < chances.detach()).to(dtype), input, p)


def chosen(input: Tensor, key: Tensor, place: DrawPlace, p: float, dtype: torch.dtype) -> Tensor:
    """Return 1 with probability p for every element of `input`, else 0."""
    return _with_zero_gradients(keep_mask(key, place, input.shape, 1 - p).to(dtype), input)


def uniform_like(
    input: Tensor, key: Tensor, place: DrawPlace, low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """Return a number between two for every element of `input`, or part of a complex one."""
    if dtype.is_complex:
        parts = (uniform(key, place, input.shape, dtype.to_real(), stream) for stream in (0, 2))
        return _with_zero_gradients(torch.complex(*parts), input)
    return _with_zero_gradients(uniform(key, place, input.shape, dtype) * (high - low) + low, input)


def normal_like(
    input: Tensor, key: Tensor, place: DrawPlace, mean: float, std: float, dtype: torch.dtype
) -> Tensor:
    """Return a number of a normal distribution for every element of `input`."""
    return _with_zero_gradients(normal(key, place, input.shape, dtype) * std + mean, input)


def normal_around(
    mean: Tensor | float, std: Tensor | float, key: Tensor, place: DrawPlace, dtype: torch.dtype
) -> Tensor:
    """Return numbers of normal distributions with the elements of `mean` and `std`."""
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if isinstance(std, Tensor):
        _require(std, std >= 0, "deviations are numbers from 0", "normal")
    middle, width = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    return _with_zero_gradients(
        (normal(key, place, shape, dtype) * width + middle).to(dtype), *tensors
    )


def log_normal_like(
    input: Tensor, key: Tensor, place: DrawPlace, mean: float, std: float, dtype: torch.dtype
) -> Tensor:
    """Return numbers whose logarithm is of a normal distribution."""
    wide = torch.promote_types(dtype, torch.float32)
    return _with_zero_gradients(
        (normal(key, place, input.shape, wide) * std + mean).exp().to(dtype), input
    )


def exponential_like(
    input: Tensor, key: Tensor, place: DrawPlace, rate: float, dtype: torch.dtype
) -> Tensor:
    """Return numbers of an exponential distribution: above 0, so that they have a logarithm."""
    wide, ends = torch.promote_types(dtype, torch.float32), torch.finfo(dtype)
    least = max(torch.finfo(wide).eps / 4, ends.smallest_normal * ends.eps)
    waits = -torch.log1p(-uniform(key, place, input.shape, wide))
    return _with_zero_gradients((waits.clamp_min_(least) / rate).to(dtype), input)


def cauchy_like(
    input: Tensor, key: Tensor, place: DrawPlace, median: float, width: float, dtype: torch.dtype
) -> Tensor:
    """Return numbers of a Cauchy distribution."""
    wide = torch.promote_types(dtype, torch.float32)
    angle = math.pi * (uniform(key, place, input.shape, wide) - 0.5)
    return _with_zero_gradients((angle.tan() * width + median).to(dtype), input)


def geometric_like(
    input: Tensor, key: Tensor, place: DrawPlace, p: float, dtype: torch.dtype
) -> Tensor:
    """Return how many trials of probability p it takes to the first success."""
    misses = torch.log1p(-uniform(key, place, input.shape, torch.float64)) / math.log1p(-p)
    return _with_zero_gradients(misses.ceil().clamp_min_(1).to(dtype), input)


def poisson(input: Tensor, key: Tensor, place: DrawPlace) -> Tensor:
    """Return whole numbers of Poisson distributions with the rates of `input`.

    Each is the least whose cumulative probability, by torch's incomplete gamma function, lies above
    a number drawn from 0 to 1.
    """
    rate = input.detach().double()
    _require(input, rate >= 0, "rates are numbers from 0", "poisson")
    level = uniform(key, place, input.shape, torch.float64)
    reach = 10 * rate.sqrt()  # beyond, and 40 more, lies less than float64 tells
    low, high = (rate - reach).floor().clamp_min_(0) - 1, (rate + reach).floor() + 40
    waits = rate.device.type == "cpu" and not torch.compiler.is_compiling()
    for _ in range(32):
        is_open = high - low > 1
        if waits and not is_open.any():
            break
        middle = ((low + high) / 2).floor()
        is_below = torch.special.gammaincc(middle + 1, rate) <= level
        low = torch.where(is_open & is_below, middle, low)
        high = torch.where(is_open & ~is_below, middle, high)
    return _with_zero_gradients(high.to(input.dtype), input)


def whole_like(
    input: Tensor, high: Tensor | int, key: Tensor, place: DrawPlace, low: int, dtype: torch.dtype
) -> Tensor:
    """Return an integer from `low` to below `high` for every element of `input`."""
    if isinstance(high, Tensor):
        _require(high, high > low, "an interval begins before it ends", "randint")
    span = high - low
    if isinstance(span, int) and 2**52 < span <= 2**63:  # finer than float64
        numbers = _long(key, place, input.shape, 0) & (2**63 - 1)
        numbers = numbers % span + low if span < 2**63 else numbers + low
    else:
        numbers = (uniform(key, place, input.shape, torch.float64) * span).floor().add_(low)
    return _with_zero_gradients(numbers.to(dtype), input)


def permutation(input: Tensor, key: Tensor, place: DrawPlace) -> Tensor:
    """Return the indices of the elements of a row in a random order."""
    return uniform(key, place, input.shape, torch.float64).argsort().to(input.dtype)


def multinomial(
    input: Tensor, key: Tensor, place: DrawPlace, count: int, replacement: bool
) -> Tensor:
    """Return `count` indices drawn by each row of weights, each once or with `replacement`."""
    weights = input.detach().double()
    is_weight = (weights >= 0) & weights.isfinite() & (weights.sum(-1, keepdim=True) > 0)
    _require(input, is_weight, "weights are numbers from 0, of each row some above", "multinomial")
    if replacement:
        shape = (*input.shape[:-1], count)
        columns = place._replace(shape=(*place.shape[:-1], count))
        points = uniform(key, columns, shape, torch.float64) * weights.sum(-1, keepdim=True)
        return torch.searchsorted(weights.cumsum(-1), points, right=True)
    ages = -(1 - uniform(key, place, input.shape, torch.float64)).log() / weights
    return ages.topk(count, -1, largest=False).indices
