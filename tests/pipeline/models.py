"""Models with eight layers for pipelines, captured once for all tests of a module.

>>> case = blocks(batch=24)     # gpt2(...), llama(...) likewise
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.pipeline import NAMES, Schedule, simulate
from autopar.pipeline.schedules.registry import GENERATORS
from tests import models
from tests.captures import shared_captures
from tests.models import Case, ResidualBlock
from tests.parity import STEPS, Outcome, single_outcome

BATCH = 24
FORMS = [
    *((name, {}) for name in NAMES if not GENERATORS[name].is_asynchronous),
    ("chimera", {"scale": "doubling"}),
    ("chimera", {"scale": "halving"}),
    ("chimera", {"scale": "list"}),
    ("chimera", {"pipes": 4}),
]


class Residuals(nn.Module):
    """A residual network of equal blocks with batch norm."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(width, width, 1, False) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


def residuals(batch: int = BATCH, layers: int = 8) -> Case:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, 4, 4, generator=random, dtype=torch.float64)
    target = torch.randint(0, 5, (batch,), generator=random)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Residuals(4, layers, 5).double()
    return Case("residuals", model, (images, target))


class MadeOfWeights(nn.Module):
    """Blocks whose parameters pass through operators of their own before activations meet them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MadeOfWeightsBlock(width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class MadeOfWeightsBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.scale = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.where(self.weight > 0, self.weight, 0.1 * self.weight)
        h = self.norm(x) * self.scale.exp()
        mixed = torch.einsum("bi,ij->bj", h, weight) + self.linear(torch.tanh(h @ weight))
        return x + mixed + weight.sum(0) * self.scale.tanh()


def made_of_weights(batch: int = 32, layers: int = 8) -> Case:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 8, generator=random, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case("made_of_weights", MadeOfWeights(8, layers).double(), (x,))


def gpt2(batch: int = BATCH, layers: int = 8) -> Case:
    return models.gpt2(batch=batch, layers=layers, hidden=16, heads=2, sequence=6, vocabulary=29)


def llama(batch: int = BATCH, layers: int = 8) -> Case:
    return models.llama(
        batch=batch, layers=layers, hidden=16, heads=2, key_heads=2, sequence=6, vocabulary=29
    )


MAKERS = {"gpt2": gpt2, "llama": llama, "residuals": residuals}


@cache
def shared(name: str, batch: int = BATCH, layers: int = 8) -> Case:
    """One case that all tests read and none changes."""
    return MAKERS[name](batch, layers)


@dataclass(frozen=True)
class _Borrowed(Case):
    """A case that runs another module than the one whose parameters learn."""

    runs: Callable[..., Tensor] = torch.sum

    def run(self) -> Tensor:
        return self.runs(*self.args)


@cache
def reference(name: str, slices: int, batch: int = BATCH, layers: int = 8) -> Outcome:
    """One device. Batch norm sees one micro-batch at a time, so the reference does too."""
    case = shared(name, batch, layers).fresh()
    if name != "residuals":
        return single_outcome(case)

    class InTurn(nn.Module):
        """Accumulates the gradients of all micro-batches."""

        def forward(self, images: Tensor, target: Tensor) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for part in zip(images.chunk(slices), target.chunk(slices)):
                total = total + case.model(*part) / slices
            return total

    borrowed = _Borrowed(case.name, case.model, case.args, case.kwargs, InTurn())
    return single_outcome(borrowed, STEPS)


def assert_recorded(module: ap.ParallelModule, made: Schedule) -> None:
    """The virtual mesh did what the schedule says, and kept what the simulator says."""
    assert tuple(tuple(one.order) for one in module.backend.recorded.values()) == made.orders
    peaks = tuple(one.peak_activations for one in module.backend.recorded.values())
    assert peaks == pytest.approx(simulate(made).peak_activations)


@pytest.fixture(scope="module", autouse=True)
def share_captures():
    """A model is captured once for all tests of a module."""
    with shared_captures():
        yield
