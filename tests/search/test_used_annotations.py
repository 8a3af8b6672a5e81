"""An annotation is kept by the plan, or refused with the line that made it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


class Forgets(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        ap.shard(hidden, ("dp", None))
        return self.down(hidden).square().mean()


def test_an_annotated_tensor_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ap.InvalidInput, match="nothing reads") as refused:
        ap.plan(Forgets(), (torch.randn(8, 8),), mesh=ap.Mesh(dp=2), mode="propagate")
    assert 'ap.shard(hidden, ("dp", None))' in str(refused.value.source)


LATE: dict[str, Callable[[Net], Any]] = {
    "parameter": lambda net: ap.shard(net.up, params={"weight": ("dp", None)}),
    "stage": lambda net: ap.shard(net.down, stage=1),
    "recompute": lambda net: ap.shard(net.down, recompute="full"),
}


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_plan_refuses_annotations_that_came_after_it(is_saved: bool, tmp_path: Path) -> None:
    for name, annotate in LATE.items():
        net, x = Net(), torch.randn(8, 8)
        plan = ap.plan(net, (x,), mesh=ap.Mesh(dp=2), mode="propagate")
        plan.save(tmp_path / name)
        annotate(net)
        given = ap.Plan.load(tmp_path / name) if is_saved else plan
        with pytest.raises(ap.InvalidInput, match="annotated afterwards") as refused:
            given.attach(net, (x,))
        assert "ap.shard(net." in str(refused.value.source)


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
