"""Models with operators of many families: all have rules, and a step is that of one device.

Each runs cut by the batch, in micro-batches too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap


class Of(nn.Module):
    """A function of modules and an input, as a loss."""

    def __init__(self, loss: Callable[..., Tensor], /, **modules: nn.Module) -> None:
        super().__init__()
        self.loss, self.parts = loss, nn.ModuleDict(modules)
        self.double()

    def forward(self, *given: Tensor) -> Tensor:
        return self.loss(*given, **self.parts)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def recurrent(x: Tensor, lstm: nn.Module, gru: nn.Module, rnn: nn.Module) -> Tensor:
    first, (hidden, _) = lstm(x)
    second, _ = gru(first)
    third, last = rnn(second.transpose(0, 1))
    return third.square().mean() + last.square().mean() + hidden.square().mean()


def windows(x: Tensor, turn: Tensor, conv: nn.Module, slope: nn.Module) -> Tensor:
    pooled, places = F.max_pool2d(slope(conv(x)), 2, return_indices=True)
    back = F.max_unpool2d(pooled, places, 2)
    columns = F.fold(F.unfold(back, 3, padding=1), back.shape[-2:], 3, padding=1)
    sampled = F.grid_sample(columns, F.affine_grid(turn, list(columns.shape), align_corners=False))
    return F.adaptive_max_pool2d(F.pixel_shuffle(sampled, 2), 3).square().mean()


def written(x: Tensor, up: nn.Module) -> Tensor:
    h = up(x)
    h[:, torch.tensor([1, 4])] += h[:, 2:4]
    h = h.index_reduce(1, torch.tensor([0, 2]), h[:, :2], "amax")
    h = h.scatter_reduce(1, h.argsort(1)[:, :2], h[:, 3:5], "mean")
    bins = torch.bucketize(h.detach(), torch.tensor([-0.5, 0.5], dtype=h.dtype))
    median = h.kthvalue(3, 1, keepdim=True).values
    return (torch.hstack([h * bins, h.unfold(1, 3, 2).flatten(1)]) - median).square().mean()


def bags(ids: Tensor, rows: Tensor, total: nn.Module, mean: nn.Module, most: nn.Module) -> Tensor:
    return (total(ids, per_sample_weights=rows) * mean(ids) + most(ids)).square().mean()


def classes(x: Tensor, target: Tensor, layers: nn.Module, loss: nn.Module) -> Tensor:
    return loss(layers(x), target)


def chunked(x: Tensor, target: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    return F.linear_cross_entropy(
        up(x), down.weight, target, linear_bias=down.bias, options=options
    )


def aligned(x: Tensor, target: Tensor, lengths: Tensor, up: nn.Module, loss: nn.Module) -> Tensor:
    scores = up(x).log_softmax(-1).transpose(0, 1)
    return loss(scores, target, torch.full_like(lengths, 6), lengths)


def varied(x: Tensor, target: Tensor, up: nn.Module, loss: nn.Module) -> Tensor:
    return loss(up(x), target, up(x).square() * target.abs())


def uneven(ids: Tensor, starts: Tensor, bags: nn.Module, down: nn.Module) -> Tensor:
    return down(bags(ids.flatten(), starts)).square().mean()


def solved(x: Tensor, up: nn.Module) -> Tensor:
    h = up(x)
    matrices = h[:, :, None] * h[:, None, :] + torch.eye(4, dtype=h.dtype)
    found = torch.linalg.solve(matrices, h) + torch.linalg.cholesky(matrices).diagonal(0, 1, 2)
    waves = torch.fft.ifft(torch.fft.rfft(h, 6).conj()) * torch.fft.hfft(h, 4)
    odd = torch.special.i0e(h) + torch.special.xlog1py(h, h.square()) * torch.erfc(h)
    spread, mean = torch.std_mean(torch.cdist(matrices, matrices.flip(1).cos()), 1)
    return waves.abs().square().mean() + (odd * spread - mean).square().mean() + found.mean()


IDS = torch.randint(7, (8, 3), generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 4, 2, -100, 3, 3, 1, 2])


def weighted(loss: type[nn.Module]) -> nn.Module:
    last = [nn.LogSoftmax(-1)] if loss is nn.NLLLoss else []
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), *last
    return Of(classes, layers=nn.Sequential(*layers), loss=loss(torch.rand(5)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "recurrent": (
        lambda: Of(
            recurrent,
            lstm=nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
            gru=nn.GRU(8, 4, batch_first=True),
            rnn=nn.RNN(4, 3, nonlinearity="relu"),
        ),
        (rows(8, 5, 3),),
    ),
    "windows": (
        lambda: Of(windows, conv=nn.Conv2d(3, 8, 3, padding=1), slope=nn.PReLU(8)),
        (rows(8, 3, 8, 8), rows(8, 2, 3)),
    ),
    "bags": (
        lambda: Of(
            bags,
            total=nn.EmbeddingBag(7, 4, mode="sum"),
            mean=nn.EmbeddingBag(7, 4, mode="mean", padding_idx=2),
            most=nn.EmbeddingBag(7, 4, mode="max"),
        ),
        (IDS, rows(8, 3).abs()),
    ),
    "classes": (lambda: weighted(nn.CrossEntropyLoss), (rows(8, 4), TARGETS)),
    "likelihoods": (lambda: weighted(nn.NLLLoss), (rows(8, 4), TARGETS)),
    "alignments": (
        lambda: Of(aligned, up=nn.Linear(4, 5), loss=nn.CTCLoss()),
        (rows(8, 6, 4), IDS % 4 + 1, IDS[:, 0] % 3 + 1),
    ),
    "variances": (
        lambda: Of(varied, up=nn.Linear(4, 3), loss=nn.GaussianNLLLoss(full=True)),
        (rows(8, 4), rows(8, 3).relu()),
    ),
    "solved": (lambda: Of(solved, up=nn.Linear(4, 4)), (rows(8, 4),)),
    "written": (lambda: Of(written, up=nn.Linear(4, 6)), (rows(8, 4),)),
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    MODELS["chunks"] = (
        lambda: Of(chunked, up=nn.Linear(4, 6), down=nn.Linear(6, 5)),
        (rows(8, 4), TARGETS),
    )
WAYS: dict[str, Any] = {
    "data": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "auto": {"mesh": ap.Mesh(x=2, y=2), "mode": "auto"},
    "stages": {"mesh": ap.Mesh(pp=2, dp=2), "mode": "data", "microbatches": 4},
}
# Bags of any length have no rows: only the columns of their table are cut.
UNEVEN = (
    lambda: Of(uneven, bags=nn.EmbeddingBag(7, 4, mode="max"), down=nn.Linear(4, 3)),
    (IDS, torch.tensor([0, 2, 2, 9])),
)
OF_ALL = "data", "auto"


@pytest.mark.parametrize(
    ("name", "way"), [*product(MODELS, OF_ALL), ("classes", "stages"), ("uneven bags", "auto")]
)
def test_a_step_is_that_of_one_device(name: str, way: str) -> None:
    torch.manual_seed(0)
    build, given = (MODELS | {"uneven bags": UNEVEN})[name]
    model = build()
    expected = model(*given)
    expected.backward()
    module = ap.parallelize(
        model, given, backend="virtual", strict=True, progress=False, **WAYS[way]
    )
    torch.testing.assert_close(module.step(*given), expected.detach(), rtol=1e-9, atol=0)
    gradients = module.full_grads()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(gradients[parameter], value.grad, rtol=1e-9, atol=1e-12)
