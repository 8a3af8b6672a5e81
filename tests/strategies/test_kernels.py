"""Kernels against torch's own functions: values, gradients, corner cases."""

from __future__ import annotations

import itertools
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.strategies.kernels import (
    KERNELS,
    batch_normalize,
    batch_sums,
    count_targets,
    cross_entropy,
    cross_entropy_combine,
    cross_entropy_part,
    cut_causal_attention,
    cut_embedding,
    rms_norm,
    running_mean,
    running_var,
)


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(shape: tuple[int, ...], affine: bool, momentum: float | None) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(shape[1], affine=affine, momentum=momentum, dtype=torch.float64)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    old_mean, old_var = norm.running_mean.clone(), norm.running_var.clone()
    norm.num_batches_tracked += 2
    x, slope = double(*shape), torch.randn(shape, dtype=torch.float64)
    leaves = [x, norm.weight, norm.bias] if affine else [x]
    wanted = norm(x)
    wanted_gradients = torch.autograd.grad(wanted, leaves, slope)

    count = x.numel() // shape[1]
    sums = batch_sums(x, old_mean)
    got = batch_normalize(x, sums, old_mean, norm.weight, norm.bias, count, norm.eps)
    close(got, wanted)
    for got_gradient, wanted_gradient in zip(
        torch.autograd.grad(got, leaves, slope), wanted_gradients
    ):
        close(got_gradient, wanted_gradient)
    batches = norm.num_batches_tracked
    close(running_mean(old_mean, sums, old_mean, batches, momentum, count), norm.running_mean)
    close(running_var(old_var, sums, old_mean, batches, momentum, count), norm.running_var)


def test_batch_sums_and_normalize_have_right_gradients() -> None:
    x, shift, weight, bias = double(5, 3, 2), double(3), double(3), double(3)
    assert torch.autograd.gradcheck(batch_sums, (x, shift))
    sums = torch.stack((torch.randn(3), torch.rand(3) * 20 + 5)).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *tensors: batch_normalize(*tensors, 10, 1e-5), (x, sums, shift, weight, bias)
    )


def test_shifted_sums_are_stable() -> None:
    """A mean a thousand times the deviation leaves digits for the variance in float32."""
    x = torch.randn(256, 2) + 3000
    shift = x.mean(0) + 0.5
    y = batch_normalize(x, batch_sums(x, shift), shift, None, None, 256, 1e-5)
    wanted = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-3, atol=1e-3)


def test_batch_norm_in_half_precision_sums_in_float32() -> None:
    x = torch.randn(64, 4).bfloat16()
    sums = batch_sums(x, torch.zeros(4))
    assert sums.dtype == torch.float32
    y = batch_normalize(x, sums, torch.zeros(4), torch.ones(4), torch.zeros(4), 64, 1e-5)
    assert y.dtype == torch.bfloat16
    wanted = F.batch_norm(x.float(), None, None, training=True)
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)


def targets(classes: int, *shape: int) -> Tensor:
    classes_of = torch.randint(classes, shape)
    classes_of.view(-1)[1] = -100
    return classes_of


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("pieces", [(7,), (4, 3), (2, 2, 2, 1), (3, 3, 1, 0)])
def test_cross_entropy(weighted: bool, smoothing: float, pieces: tuple[int, ...]) -> None:
    """Sum by count is torch's mean; the classes in pieces, uneven and empty, give the same."""
    logits, target = double(4, 3, 7), targets(7, 4, 3)
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    wanted = F.cross_entropy(logits.view(-1, 7), target.view(-1), weight, label_smoothing=smoothing)
    slope = torch.autograd.grad(wanted, logits)[0]

    losses = cross_entropy(logits, target, weight, -100, smoothing)
    mean = losses.sum() / count_targets(target, weight, -100)
    close(mean, wanted)
    close(torch.autograd.grad(mean, logits)[0], slope)
    assert losses.view(-1)[1] == 0

    starts = [0, *itertools.accumulate(pieces)]
    parts = [
        cross_entropy_part(
            logits[..., start : start + size],
            target,
            None if weight is None else weight[start : start + size],
            start,
            7,
            -100,
            smoothing,
        )
        for start, size in zip(starts, pieces)
    ]
    together = cross_entropy_combine(torch.cat(parts, -1), target, len(pieces), -100)
    close(together, losses)
    mean = together.sum() / count_targets(target, weight, -100)
    close(torch.autograd.grad(mean, logits)[0], slope)


def test_cut_cross_entropy_with_large_and_infinite_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-torch.inf, -torch.inf, 1.0, 2.0]])
    logits = logits.double().requires_grad_()
    target = torch.tensor([3, 2])
    wanted = F.cross_entropy(logits, target, reduction="none")
    parts = [
        cross_entropy_part(logits[:, s : s + 2], target, None, s, 4, -100, 0.0) for s in (0, 2)
    ]
    got = cross_entropy_combine(torch.cat(parts, -1), target, 2)
    close(got, wanted)
    slope = torch.autograd.grad(wanted.sum(), logits)[0]
    close(torch.autograd.grad(got.sum(), logits)[0], slope)


def test_cut_cross_entropy_has_right_gradients() -> None:
    logits, target = double(3, 4), torch.tensor([0, 5, -100])
    weight = torch.rand(4, dtype=torch.float64)
    for smoothing in (0.0, 0.3):
        assert torch.autograd.gradcheck(
            lambda x: cross_entropy_part(x, target, weight, 2, 9, -100, smoothing),  # noqa: B023
            (logits,),
        )


def test_cut_cross_entropy_keeps_the_dtype() -> None:
    logits, target = torch.randn(3, 4).bfloat16(), torch.tensor([0, 1, 2])
    part = cross_entropy_part(logits, target, None, 0, 4)
    assert part.dtype == torch.float32
    losses = cross_entropy_combine(part, target, 1, dtype=logits.dtype)
    assert losses.dtype == cross_entropy(logits, target).dtype == torch.bfloat16


@pytest.mark.parametrize("padding", [-1, 4])
def test_cut_embedding(padding: int) -> None:
    weight, ids = double(7, 3), torch.randint(7, (4, 5))
    slope = torch.randn(4, 5, 3, dtype=torch.float64)
    wanted = torch.embedding(weight, ids, padding)
    pieces = [(0, 3), (3, 3), (6, 1), (7, 0)]
    got = sum(cut_embedding(weight[s : s + n], ids, padding, start=s) for s, n in pieces)
    assert isinstance(got, Tensor)
    close(got, wanted)
    close(torch.autograd.grad(got, weight, slope)[0], torch.autograd.grad(wanted, weight, slope)[0])
    with pytest.raises(ValueError, match="frequency"):
        cut_embedding(weight, ids, scale_grad_by_freq=True, start=0)


@pytest.mark.parametrize("keys", [7, 4, 9])
def test_cut_causal_attention(keys: int) -> None:
    query, key, value = double(2, 4, 7, 3), double(2, 2, keys, 3), double(2, 2, keys, 3)
    wanted = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.4, enable_gqa=True
    )
    got = torch.cat(
        [
            cut_causal_attention(
                query[:, :, s : s + n], key, value, scale=0.4, enable_gqa=True, start=s
            )
            for s, n in [(0, 3), (3, 3), (6, 1), (7, 0)]
        ],
        2,
    )
    close(got, wanted)
    slope = torch.randn_like(got)
    for got_gradient, wanted_gradient in zip(
        torch.autograd.grad(got, (query, key, value), slope),
        torch.autograd.grad(wanted, (query, key, value), slope),
    ):
        close(got_gradient, wanted_gradient)


def test_every_kernel_is_of_one_kind() -> None:
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert kernel.expand is None or kernel.joint is None
        if kernel.expand is None and kernel.joint is None:
            assert "start" in str(getattr(kernel.function, "_schema", signature(kernel.function)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "eps"), [([6], None), ([6], 1e-6), ([4, 6], 1e-6)])
def test_rms_norm(dtype: torch.dtype, shape: list[int], eps: float | None) -> None:
    """To the bit what torch gives, and with the same gradients."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6).to(dtype).requires_grad_()
    weight = torch.randn(shape).to(dtype).requires_grad_()
    for scales in (weight, None):
        got, wanted = rms_norm(x, shape, scales, eps), F.rms_norm(x, shape, scales, eps)
        assert torch.equal(got, wanted)
        leaves = [leaf for leaf in (x, scales) if leaf is not None]
        slope = torch.randn_like(wanted)
        for mine, other in zip(
            torch.autograd.grad(got, leaves, slope), torch.autograd.grad(wanted, leaves, slope)
        ):
            close(mine, other, 4 * torch.finfo(dtype).eps)


def test_rms_norm_has_gradients_of_gradients() -> None:
    x, weight = double(3, 4), double(4)
    assert torch.autograd.gradgradcheck(lambda *args: rms_norm(args[0], [4], args[1]), (x, weight))
