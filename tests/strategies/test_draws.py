"""Keyed draws: bits are as good as a generator's, and pieces draw as the whole does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.strategies.kernels import keyed_draws
from autopar.strategies.kernels.attention import dropped_attention
from autopar.strategies.kernels.keyed_draws import DrawPlace, keep_mask, normal, uniform

KEY = torch.tensor([123456789123, 0])
SHAPE = (512, 1024)
SIGMAS = 5.0


def bits(key: Tensor = KEY, number: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return keyed_draws._draw(
        key, DrawPlace(number, shape), shape, lambda raw: raw, dtype=torch.int32
    )


MASK = 2**64 - 1


def reference(key: int, number: int, stream: int, row: int, column: int) -> int:
    """Return the 32 bits of one element by integers alone, as the generator is documented."""

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    seed = mixed(((2 * number + 1) * golden + stream) & MASK)
    hashed = mixed(((key + row * golden) & MASK) ^ seed)
    x = (column * 0x9E3779B1 ^ hashed) & 0xFFFFFFFF
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x ^= x >> 15
    x ^= hashed >> 32
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    x ^= x >> 13
    x = (x * 0x27D4EB2F) & 0xFFFFFFFF
    return x ^ (x >> 16)


# By key, number of the operator, stream, row and column; `reference` gave them once.
GOLDEN: dict[tuple[int, int, int, int, int], int] = {
    (0, 0, 0, 0, 0): 0x81DFF2A0,
    (0, 0, 0, 0, 1): 0xABA4F69A,
    (0, 0, 0, 1, 0): 0x117D0A29,
    (1, 0, 0, 0, 0): 0x95B01810,
    (-1, 3, 0, 2, 7): 0x719E1864,
    (123456789123, 0, 1, 5, 1000): 0x63FD6FAD,
    (9223372036854775807, 100, 2, 300, 3): 0xB1751757,
    (-9223372036854775808, 1, 4, 17, 29): 0x3AD0BF47,
}


@pytest.mark.parametrize(("place", "expected"), GOLDEN.items())
def test_bits_are_those_that_are_written_down(
    place: tuple[int, int, int, int, int], expected: int
) -> None:
    """A run that is resumed with another version draws the same numbers."""
    key, number, stream, row, column = place
    assert reference(*place) == expected
    shape = (row + 1, column + 1)
    drawn = keyed_draws._draw(
        torch.tensor([key, 0]),
        DrawPlace(number, shape),
        shape,
        lambda raw: raw,
        dtype=torch.int32,
        stream=stream,
    )
    assert int(drawn[row, column]) & 0xFFFFFFFF == expected


@pytest.mark.parametrize(
    ("dtype", "digits"),
    [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24), (torch.float64, 53)],
)
def test_numbers_are_the_first_bits_that_are_drawn(dtype: torch.dtype, digits: int) -> None:
    key, shape = -(2**40) - 7, (3, 5)
    numbers = uniform(torch.tensor([key, 0]), DrawPlace(4, shape), shape, dtype).double()
    mask = keep_mask(torch.tensor([key, 0]), DrawPlace(4, shape), shape, 0.25)
    for row, column in itertools.product(*map(range, shape)):
        first, second = (reference(key, 4, stream, row, column) for stream in (0, 1))
        whole = (first << 32 | second) >> (64 - digits)
        assert float(numbers[row, column]) == whole / 2**digits
        signed = first - 2**32 if first >= 2**31 else first
        assert bool(mask[row, column]) == (signed >= 2**30 - 2**31)


def deviation(one: Tensor, other: Tensor) -> float:
    """Return by how many standard deviations the number of equal bits differs from chance."""
    differ = one ^ other
    counts = torch.stack([((differ >> bit) & 1).sum() for bit in range(32)]).double()
    half = differ.numel() / 2
    return float(((counts - half).abs() / math.sqrt(half / 2)).max())


def test_bits_are_balanced_and_neighbours_are_strangers() -> None:
    numbers = bits()
    assert deviation(numbers, torch.zeros_like(numbers)) < SIGMAS
    for apart in (1, 2, 3, 7, 64):
        assert deviation(numbers[:, apart:], numbers[:, :-apart]) < SIGMAS
        assert deviation(numbers[apart:], numbers[:-apart]) < SIGMAS


def test_operators_and_keys_are_strangers() -> None:
    numbers = bits()
    for number in (1, 2, 3, 100):
        other = bits(number=number)
        assert deviation(numbers, other) < SIGMAS
        # Nor has one of them the rows of another, in whatever order.
        assert not set(numbers[:, 0].tolist()) & set(other[:, 0].tolist())
    for apart in (1, 2, -1, 2**40):
        assert deviation(numbers, bits(KEY + torch.tensor([apart, 0]))) < SIGMAS
    seeds = [bits(torch.tensor([seed, 0]), shape=(64, 64)) for seed in range(50)]
    assert max(map(deviation, seeds, seeds[1:])) < SIGMAS


def test_pairs_and_runs_are_as_often_as_by_chance() -> None:
    numbers = uniform(KEY, DrawPlace(0, SHAPE), SHAPE, torch.float64)
    levels = (numbers * 64).long()
    for pairs in (levels[:, :-1] * 64 + levels[:, 1:], levels[:-1] * 64 + levels[1:]):
        counts, mean = pairs.flatten().bincount(minlength=4096).double(), pairs.numel() / 4096
        squares = float(((counts - mean) ** 2 / mean).sum())
        assert abs(squares - 4095) / math.sqrt(2 * 4095) < SIGMAS
    up = (numbers[:, 1:] > numbers[:, :-1]).double().mean()
    assert abs(float(up) - 0.5) * math.sqrt(12 * numbers.numel()) < SIGMAS


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_vary_as_coins_do(p: float) -> None:
    mask = keep_mask(KEY, DrawPlace(0, SHAPE), SHAPE, p).double() - (1 - p)
    assert abs(float(mask.mean())) < SIGMAS * math.sqrt(p * (1 - p) / mask.numel())
    for dim, count in enumerate(SHAPE):
        variance = float(mask.sum(dim).var()) / (count * p * (1 - p))
        assert abs(variance - 1) < SIGMAS * math.sqrt(2 / SHAPE[1 - dim])


def test_ends_of_probabilities() -> None:
    assert bool(keep_mask(KEY, DrawPlace(0, SHAPE), SHAPE, 0.0).all())
    assert not bool(keep_mask(KEY, DrawPlace(0, SHAPE), SHAPE, 1.0).any())
    x = torch.randn(4, 3)
    assert torch.equal(keyed_draws.dropout(x, KEY, DrawPlace(0, (4, 3)), 1.0), torch.zeros(4, 3))
    heads = torch.randn(1, 2, 4, 3)
    output = dropped_attention.attention(
        heads, heads, heads, None, KEY, DrawPlace(0, (1, 2, 4, 4)), 1.0, True
    )
    assert torch.equal(output, torch.zeros_like(heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_have_their_ends_mean_and_variance(dtype: torch.dtype) -> None:
    numbers = uniform(KEY, DrawPlace(0, SHAPE), SHAPE, dtype).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(numbers.var()) * 12 - 1) < 0.02
    bell = normal(KEY, DrawPlace(0, SHAPE), SHAPE, dtype).double()
    assert bool(bell.isfinite().all())
    moments = [float(bell.pow(power).mean()) for power in (1, 2, 4)]
    assert moments == pytest.approx([0, 1, 3], abs=0.05)


def _levels(numbers: Tensor, ends: list[float]) -> list[float]:
    """Return the share of numbers at or below each end."""
    return [float((numbers.double() <= end).double().mean()) for end in ends]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_are_of_their_distributions(dtype: torch.dtype) -> None:
    like, place = torch.empty(SHAPE, dtype=dtype), DrawPlace(0, SHAPE)
    numbers = keyed_draws.exponential_like(like, KEY, place, 2.0, dtype)
    assert float(numbers.min()) > 0
    assert bool(numbers.log().isfinite().all())
    ends = [0.05, 0.3, 1.0, 2.5]
    expected = [1 - math.exp(-2 * end) for end in ends]
    assert _levels(numbers, ends) == pytest.approx(expected, abs=0.003)
    numbers = keyed_draws.cauchy_like(like, KEY, place, 1.0, 2.0, dtype)
    ends = [-9.0, -1.0, 1.0, 5.0]
    expected = [0.5 + math.atan((end - 1) / 2) / math.pi for end in ends]
    assert _levels(numbers, ends) == pytest.approx(expected, abs=0.003)
    numbers = keyed_draws.log_normal_like(like, KEY, place, 0.3, 0.5, dtype)
    logs = numbers.double().log()
    assert [float(logs.mean()), float(logs.std())] == pytest.approx([0.3, 0.5], abs=0.003)
    numbers = keyed_draws.geometric_like(like, KEY, place, 0.3, dtype)
    ends = [0.0, 1.0, 2.0, 7.0]
    assert _levels(numbers, ends) == pytest.approx([1 - 0.7**end for end in ends], abs=0.003)


def test_counts_are_of_poisson_distributions() -> None:
    rates = torch.tensor([0.0, 0.3, 4.0, 50.0, 3e4]).double()
    numbers = keyed_draws.poisson(rates.expand(20000, 5), KEY, DrawPlace(0, (20000, 5)))
    assert torch.equal(numbers, numbers.floor())
    assert not bool(numbers[:, 0].any())
    for rate, counts in zip(rates.tolist()[1:], numbers.unbind(1)[1:]):
        sigma = math.sqrt(rate / len(counts))
        assert abs(float(counts.mean()) - rate) < SIGMAS * sigma
        assert abs(float(counts.var()) / rate - 1) < SIGMAS * math.sqrt(3 / len(counts))
    chances = [math.exp(-4) * 4**count / math.factorial(count) for count in range(8)]
    shares = (numbers[:, 2:3] == torch.arange(8)).double().mean(0)
    assert shares.tolist() == pytest.approx(chances, abs=0.015)


def test_whole_numbers_of_all_sizes_have_all_digits() -> None:
    like, place = torch.empty(SHAPE, dtype=torch.int64), DrawPlace(0, SHAPE)
    for high in (2**63, 2**63 - 1, 2**52 + 1):
        numbers = keyed_draws.whole_like(like, high, KEY, place, 0, torch.int64)
        assert int(numbers.min()) >= 0
        assert float(numbers.double().mean()) / high == pytest.approx(0.5, abs=0.003)
        odd = float((numbers & 1).double().mean()) - 0.5
        assert abs(odd) * 2 * math.sqrt(numbers.numel()) < SIGMAS


@pytest.mark.parametrize("shape", [(7,), (6, 1), (5, 3, 4), (2, 3, 4, 5)])
def test_a_piece_is_that_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = uniform(KEY, DrawPlace(4, shape), shape, torch.float64)
    for dim, size in enumerate(shape):
        for start in range(size):
            length = min(2, size - start)
            local = (*shape[:dim], length, *shape[dim + 1 :])
            starts = tuple(start if d == dim else 0 for d in range(len(shape)))
            piece = uniform(KEY, DrawPlace(4, shape, starts), local, torch.float64)
            assert torch.equal(piece, whole.narrow(dim, start, length))
        if size % 2 == 0:  # as the second micro-batch
            place = DrawPlace(4, shape).in_batches(dim, 2)
            local = (*shape[:dim], size // 2, *shape[dim + 1 :])
            piece = uniform(torch.tensor([KEY[0], 1]), place, local, torch.float64)
            assert torch.equal(piece, whole.narrow(dim, size // 2, size // 2))


SLICED = [(slices, count, number) for slices in (2, 3) for count in (2, 4) for number in (0, 1)]


def _order(size: int, slices: int, count: int, number: int) -> Tensor:
    """Return the samples of a micro-batch, of a part of each slice."""
    return torch.arange(size).view(slices, count, -1)[:, number].flatten()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_of_every_slice_is_that_of_the_whole(dim: int) -> None:
    shape = (*(3, 2)[:dim], 24, *(3, 2)[dim:])
    whole = uniform(KEY, DrawPlace(4, shape), shape, torch.float64)
    for slices, count, number in SLICED:
        place = DrawPlace(4, shape).in_batches(dim, count)._replace(slices=slices)
        key, size = torch.tensor([KEY[0], number]), 24 // count
        expected = whole.index_select(dim, _order(24, slices, count, number))
        for start in (0, size // 2 - 1):
            length = size - start
            local_place = place._replace(starts=(*[0] * dim, start))
            local = (*shape[:dim], length, *shape[dim + 1 :])
            piece = uniform(key, local_place, local, torch.float64)
            assert torch.equal(piece, expected.narrow(dim, start, length))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_a_part_of_every_slice(dim: int, is_causal: bool) -> None:
    """Samples are sequences, heads whose groups share keys, or queries."""
    shape, size = [2, 2, 3], 48 if dim == 1 else 24
    shape[dim] = size
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(*shape, 4, dtype=torch.float64, generator=generator)
    ends = (*shape[:2], 24 if dim == 2 else 5, 4)
    key, value = (torch.randn(ends, dtype=torch.float64, generator=generator) for _ in range(2))
    if is_grouped := dim == 1:
        key, value = key[:, ::2], value[:, ::2]
    place = DrawPlace(2, (*shape, ends[2]))
    how = (0.3, is_causal, None, is_grouped)
    whole = dropped_attention.attention(query, key, value, None, KEY, place, *how)
    for slices, count, number in SLICED:
        order = _order(size, slices, count, number)
        queries = query.index_select(dim, order)
        of_keys = order[::2] // 2 if is_grouped else order
        k, v = (x if dim == 2 else x.index_select(dim, of_keys) for x in (key, value))
        part = place.in_batches(dim, count)._replace(slices=slices)
        drawn = torch.tensor([KEY[0], number])
        output = dropped_attention.attention(queries, k, v, None, drawn, part, *how)
        expected = whole.index_select(dim, order)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_attention_keeps_no_weights() -> None:
    query, key, value = (torch.randn(2, 4, 256, 8, requires_grad=True) for _ in range(3))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        dropped_attention.attention(
            query, key, value, None, KEY, DrawPlace(0, (2, 4, 256, 256)), 0.1, True
        )
    assert sum(saved) <= 4 * query.numel() + KEY.numel()


def test_attention_selects_nothing_among_its_weights() -> None:
    """Bools of all weights, and selecting by them, take a host ten times as long as numbers do."""
    chosen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            is_whole = isinstance(result, Tensor) and result.numel() >= 2 * 4 * 64 * 64
            selects = func.overloadpacket.__name__ in ("where", "masked_fill", "masked_fill_")
            if is_whole and (selects or result.dtype == torch.bool):
                chosen.append(str(func))
            return result

    heads = torch.randn(2, 4, 64, 8, requires_grad=True)
    with Watch():
        output = dropped_attention.attention(
            heads, heads, heads, None, KEY, DrawPlace(0, (2, 4, 64, 64)), 0.1, True
        )
        output.sum().backward()
    assert chosen == []


def test_an_accelerator_is_given_many_weights_at_once() -> None:
    heads = torch.empty(8, 16, 1024, 4, device="meta")
    place = DrawPlace(0, (8, 16, 1024, 1024))
    weights = dropped_attention._DroppedWeights(place, 0.1, is_causal=True, scale=0.5)
    parts = list(weights.parts(heads, heads, heads, None, KEY.to("meta"), (8, 16)))
    assert len(parts) == 4
    assert all(part.weights.numel() <= 2**26 for part in parts)


@pytest.mark.parametrize("rows", [1, 100])
def test_attention_is_the_product_of_dropped_weights(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its mask's gradient, whatever is computed at a time."""
    monkeypatch.setattr(dropped_attention, "_SCORES", {"cpu": rows * 6})
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (1, 1, 5, 6))
    ]
    place = DrawPlace(2, (2, 3, 5, 6))
    query, key, value, mask = inputs
    noise = keep_mask(KEY, place, (2, 3, 5, 6), 0.3).double() / 0.7
    weights = (query @ key.transpose(-2, -1) / 2 + mask).softmax(-1)
    expected = (weights * noise) @ value
    output = dropped_attention.attention(query, key, value, mask, KEY, place, 0.3, False)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    for gradient, other in zip(
        torch.autograd.grad(output, inputs, slope), torch.autograd.grad(expected, inputs, slope)
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
