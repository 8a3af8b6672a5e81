"""Models deeper than Python's stack."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import share_captures  # noqa: F401

LAYERS = 300


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def deep() -> Case:
    return Case("deep", Deep().double(), (torch.randn(4, 4, dtype=torch.float64),))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "propagate", "mesh": ap.Mesh(dp=2)},
        {"mode": "auto", "mesh": ap.Mesh(x=2), "cluster": ap.Cluster.local(2, measure=False)},
        {"mode": "propagate", "mesh": ap.Mesh(pp=2), "microbatches": 2},
    ],
)
def test_deep_models_are_planned_and_trained(options: dict) -> None:
    case = deep()
    module = ap.parallelize(case.model, case.args, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
