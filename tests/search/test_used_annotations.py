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


class WithMore(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, ap.shard(y * 2, ("dp", None))


class DropsMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up = WithMore(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)[0]).square().mean()


def test_an_annotated_result_that_the_caller_of_a_module_drops_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="in up says nothing: nothing reads its result") as heard:
        ap.plan(DropsMore(), (torch.randn(8, 8),), mesh=ap.Mesh(dp=2), mode="propagate")
    assert len(heard) == 1


class WritesMarked(Net):
    """What is annotated is the tensor itself: a write to either changes both."""

    def __init__(self, *, to_marked: bool) -> None:
        super().__init__()
        self.to_marked = to_marked

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) + 1
        marked = ap.shard(hidden.view(2, 4, 8), ("dp", None, "tp"))
        (marked if self.to_marked else hidden).mul_(2)
        return self.down(hidden + marked.view(8, 8)).square().mean()


@pytest.mark.parametrize("to_marked", [True, False])
def test_writes_to_an_annotated_tensor_change_the_tensor(to_marked: bool) -> None:
    model, x = WritesMarked(to_marked=to_marked).double(), torch.randn(8, 8).double()
    mesh = ap.Mesh(dp=2, tp=2)
    module = ap.parallelize(model, (x,), mesh=mesh, mode="propagate", backend="virtual")
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(module.step(x), loss.detach())
    gradients = module.full_grads()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_layout_that_is_written_otherwise_is_the_same() -> None:
    net, x = Net(), torch.randn(8, 8)
    ap.shard(net.up, params={"weight": ("dp", None)})
    plan = ap.plan(net, (x,), mesh=ap.Mesh(dp=2), mode="propagate")
    ap.shard(net.up, params={"weight": (("dp",), None)})
    plan.attach(net, (x,))


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
