"""Batch norm in pipelines that cut its channels: stages read pieces of what they change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar as ap
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.random_runs import InTurns
from tests.toy import machines

MESH = ap.Mesh(pp=2, a=2)
COUNT = 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.blocks(self.norm(self.stem(x)))
        return self.head(x.mean((2, 3))).square().mean()


def net() -> Case:
    torch.manual_seed(0)
    return Case("net", Net().double().train(), (torch.randn(8, 3, 4, 4, dtype=torch.float64),))


def by_output(model) -> None:
    for norm in (model.norm, model.blocks[1].norm):
        ap.shard(norm, ((None, "a", None, None),))


def by_one_and_by_weight(model) -> None:
    ap.shard(model.norm, params={"weight": ("a",)})
    ap.shard(model.blocks[0].norm, ((None, "a", None, None),))


def by_nothing(model) -> None:
    """Left to the choice, which cuts channels where links cost little."""


@pytest.mark.parametrize(
    ("annotate", "options"),
    [
        (by_output, {"schedule": "1f1b"}),
        (by_output, {"schedule": "chimera"}),
        (by_output, {"schedule": "zb-h1"}),
        (by_one_and_by_weight, {"schedule": "gpipe"}),
        (by_nothing, {"mode": "auto", "cluster": machines(4, bandwidth=1e12)}),
    ],
)
@pytest.mark.filterwarnings("ignore:batch norm")
def test_channels_are_cut(annotate, options):
    case = net()
    annotate(case.model)
    options = {"mesh": MESH, "mode": "propagate", "microbatches": COUNT, "check": True, **options}
    module = ap.parallelize(case.model, case.args, backend="virtual", progress=False, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(InTurns.of(net(), COUNT)))


class Looks(nn.Module):
    """Uses the running mean itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.norm(self.first(x))
        return (self.last(y) + self.norm.running_mean).square().mean()


@pytest.mark.filterwarnings("ignore:batch norm")
def test_a_running_mean_is_not_read_for_its_value():
    model, x = Looks().double(), torch.randn(8, 4).double()
    ap.shard(model.norm, ((None, "a"),))
    with pytest.raises(ap.InvalidInput, match="a buffer that a step changes is not read"):
        ap.plan(model, (x,), mesh=MESH, mode="propagate", microbatches=2)
