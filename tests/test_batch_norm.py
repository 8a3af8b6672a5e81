"""Batch norm takes its statistics over micro-batches where somebody asks for them, and is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.options import PlanOptions
from autopar.planning import make_plans

X, Y = torch.randn(16, 4), torch.randn(16, 1)
OVER_2 = "batch norm (layers.1) takes its statistics over each of 2 micro-batches"


EIGHT = ap.Cluster.preset("dgx-h100")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


@contextmanager
def told(count: int) -> Iterator[None]:
    """Require so many notices, of two micro-batches."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in found if "statistics" in str(one.message)]
    assert len(texts) == count
    assert all(text.startswith(OVER_2) for text in texts)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(pp=2)},
        {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b"},
        {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "mode": "propagate"},
        {"cluster": ap.Cluster.preset("dgx-h100"), "memory": 2e4},
    ],
    ids=str,
)
def test_nothing_else_takes_micro_batches(options: dict[str, Any]) -> None:
    with told(0):
        assert ap.plan(Net(), (X, Y), **options).microbatches == 1


def test_a_schedule_that_needs_several_is_refused() -> None:
    schedule = {"name": "chimera", "scale": "halving"}
    with pytest.raises(InvalidInput, match="taken only when asked for"):
        ap.plan(Net(), (X, Y), mesh=ap.Mesh(pp=2), schedule=schedule)


def _asked(folder: Path, **options: Any) -> Any:
    return ap.parallelize(Net(), (X, Y), microbatches=2, backend="virtual", **options)


def _from_file(folder: Path, **options: Any) -> Any:
    with told(1):
        ap.plan(Net(), (X, Y), microbatches=2, **options).save(folder / "plan.json")
    plan = ap.Plan.load(folder / "plan.json")
    return ap.parallelize(Net(), (X, Y), plan=plan, backend="virtual")


@pytest.mark.parametrize("make", [_asked, _from_file])
@pytest.mark.parametrize("mesh", [ap.Mesh(dp=2), ap.Mesh(pp=2)], ids=str)
def test_what_is_asked_for_is_told_once(
    make: Callable[..., Any], mesh: ap.Mesh, tmp_path: Path
) -> None:
    with told(1):
        module = make(tmp_path, mesh=mesh)
        module.step(X, Y)
        module.step(X, Y)


def test_it_is_the_plain_model_on_each_micro_batch() -> None:
    torch.manual_seed(0)
    model, x, y = Net().double(), X.double(), Y.double()
    with told(1):
        module = ap.parallelize(
            model, (x, y), mesh=ap.Mesh(dp=2), microbatches=2, backend="virtual"
        )
    loss = module.step(x, y)
    shares = [model(*half) / 2 for half in zip(x.chunk(2), y.chunk(2))]
    sum(shares).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(loss, sum(shares))
    for name, gradient in module.full_grads().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(module.full_state_dict()[name], buffer)


def test_verify_says_why_it_differs() -> None:
    with told(1):
        found = ap.verify(Net(), (X, Y), mesh=ap.Mesh(dp=2), microbatches=2)
    assert not found.ok
    (difference,) = found.differences
    assert difference.where == "statistics of batch norm (layers.1)"
    assert difference.values == ("of the batch", "of each of 2 micro-batches")


def test_as_many_plans_are_kept_as_are_wanted() -> None:
    """With one micro-batch, which is not asked for, as with the number that is."""
    for options in ({}, {"microbatches": 1}):
        plans = make_plans(Net(), (X, Y), None, PlanOptions(cluster=EIGHT, **options), 3)
        assert len(plans) == 3
        assert all(plan.microbatches == 1 for plan in plans)
