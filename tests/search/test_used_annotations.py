"""An annotation is kept by the plan, or refused with the line that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def removed(net: Net) -> None:
    ap.shard(net.up, params={"bias": ("tp",)})
    net.up.bias = None


REFUSED: dict[str, tuple[Callable[[Net], Any], dict[str, Any], str]] = {
    "input beside data": (lambda net: ap.shard(net.up, (("dp", None),)), {"mode": "data"}, "data"),
    "parameter beside data": (
        lambda net: ap.shard(net.up, params={"weight": ("tp", None)}),
        {"mode": "data"},
        "an annotation of Linear.weight",
    ),
    "parameter that is removed": (removed, {}, "up.bias, which it no longer has"),
    "input of what does not run": (
        lambda net: ap.shard(net.idle, (("dp", None),)),
        {},
        "idle, which forward does not run",
    ),
    "output of what does not run": (
        lambda net: ap.shard(net.idle, None, (("dp", None),)),
        {},
        "idle, which forward does not run",
    ),
    "stage without a pipeline": (lambda net: ap.shard(net.down, stage=1), {}, "no pipeline"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_keeps_is_refused(name: str) -> None:
    annotate, options, said = REFUSED[name]
    net = Net()
    annotate(net)
    with pytest.raises(ap.InvalidInput, match=said) as refused:
        ap.plan(net, (torch.randn(8, 8),), mesh=ap.Mesh(dp=2, tp=2), **options)
    assert "ap.shard(net." in str(refused.value.source)


def test_a_parallel_module_takes_no_annotation() -> None:
    module = ap.parallelize(
        Net(), (torch.randn(8, 8),), mesh=ap.Mesh(dp=2), mode="data", backend="virtual"
    )
    for target, said in (
        (module, {"in_strategy": (("dp", None),)}),
        (module.up, {"params": {"weight": ("dp", None)}}),
        (module.up, {"stage": 1}),
        (module.up, {"device": "host"}),
        (nn.Sequential(module.up), {"recompute": "full"}),
    ):
        with pytest.raises(ap.InvalidInput, match="before it is made parallel"):
            ap.shard(target, **said)
