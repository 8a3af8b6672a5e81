"""What forward leaves in lists and dicts of its arguments stands in the caller's own afterwards."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers  # noqa: F401 (its caches are looked for in all containers)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput
from autopar.runtime.batches.local_inputs import refuse_questions_about_slices

MESHES: list[dict[str, Any]] = [
    {"mesh": ap.Mesh(dp=2, tp=2)},
    {"mesh": ap.Mesh(pp=2), "microbatches": 2, "schedule": "gpipe"},
]


X = torch.randn(4, 4)


class Changes(nn.Module):
    """All kinds of changes to a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        labels = batch.pop("labels")
        batch["mask"] = mask = labels >= 0
        batch["x"] = 2 * batch["x"] + batch["shift"]  # as it was before it is written to
        batch["shift"].add_(1.0)
        batch["old"] = batch["shift"]
        batch["seen"][0] = "step"
        batch["seen"].append({"counts": (mask.sum(), 3, mask.shape), "same": batch["seen"]})
        hidden = torch.tanh(self.first(batch["x"] + batch["shift"]))
        losses = F.cross_entropy(self.second(hidden), labels.clamp(min=0), reduction="none")
        return losses.masked_fill(~mask, 0.0).sum()


def example() -> tuple[Changes, dict[str, Any]]:
    torch.manual_seed(0)
    labels = torch.tensor([1, -100, 0, 4, -100, 2, 3, 3])
    x, shift = (torch.randn(8, 4, dtype=torch.float64) for _ in range(2))
    return Changes().double(), {"x": x, "shift": shift, "labels": labels, "seen": ["", labels]}


@pytest.mark.parametrize("options", MESHES)
def test_they_are_those_of_the_model(options: dict[str, Any]) -> None:
    model, batch = example()
    plain, seen = copy.deepcopy(model), batch["seen"]
    module = ap.parallelize(model, (batch,), backend="virtual", **options)
    assert list(batch) == ["x", "shift", "labels", "seen"]  # a plan changes nothing
    labels, shift = batch["labels"], batch["shift"]
    own = copy.deepcopy(batch)
    loss, expected = module.step(batch), plain(own)
    torch.testing.assert_close(loss, expected)
    assert list(batch) == list(own) == ["x", "shift", "seen", "mask", "old"]
    assert batch["seen"] is seen
    assert seen[1] is labels
    assert batch["old"] is batch["shift"] is shift
    assert seen[2].pop("same") is seen
    own["seen"][2].pop("same")
    assert seen.pop(0) == own["seen"].pop(0) == "step"
    found, wanted = pytree.tree_leaves(batch), pytree.tree_leaves(own)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    expected.backward()
    for name, gradient in module.full_grads().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_verify_gives_each_its_own() -> None:
    model, batch = example()
    assert ap.verify(model, (batch,), mesh=ap.Mesh(dp=2)).ok
    assert list(batch) == ["x", "shift", "labels", "seen"]


@dataclass
class Batch:
    x: Tensor
    scale: Tensor | None


torch.export.register_dataclass(Batch)


class OfBatch(nn.Linear):
    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        batch.x, batch.scale = x + 1.0, None
        return super().forward(x).square().mean()


def test_a_dataclass() -> None:
    batch = Batch(X, X.sum())
    module = ap.parallelize(OfBatch(4, 4), (batch,), mesh=ap.Mesh(dp=2), backend="virtual")
    module(batch)
    assert torch.equal(batch.x, X + 1.0)
    assert batch.scale is None


class Repeated(nn.Module):
    """Blocks of which the last stands for a copy."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        made = [block(x) for block in self.blocks]
        batch["last"] = made[-1].detach()
        return torch.stack(made).square().mean()


class Leaves(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind

    def forward(self, batch: dict[str, Any]) -> Tensor:
        y = super().forward(batch["x"])
        made = {
            "learned": y,
            "detached": y.detach(),
            "drawn": torch.rand_like(y),
            "weight": self.weight,
            "object": object(),
        }
        batch["y"] = made[self.kind]
        return y.square().mean()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Leaves("learned"), "more than inputs"),
        (Leaves("detached"), "more than inputs"),
        (Leaves("drawn"), "more than inputs"),
        (Leaves("weight"), "more than inputs"),
        (Leaves("object"), "type object"),
        (Repeated(), "more than inputs"),
    ],
)
def test_what_more_than_inputs_says_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(InvalidInput, match=rf"leaves in a container.*\n.*{said}") as error:
        capture(model, ({"x": X},))
    assert "args[0]" in str(error.value)
    assert "test_containers.py" in str(error.value.source)


def test_what_takes_a_gradient_is_refused() -> None:
    class Scales(nn.Linear):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            batch["x"] = batch["x"] * 2
            return super().forward(batch["x"]).sum()

    with pytest.raises(InvalidInput, match="takes a gradient") as error:
        capture(Scales(4, 4), ({"x": X.clone().requires_grad_()},))
    assert 'batch["x"] * 2' in str(error.value.source)


def test_with_local_inputs_none_is_made_of_slices() -> None:
    plan = ap.plan(OfBatch(4, 4), (Batch(X, X[0]),), mesh=ap.Mesh(dp=2), mode="data")
    with pytest.raises(InvalidInput, match="with local inputs") as error:
        refuse_questions_about_slices(plan)
    assert "batch.x, batch.scale" in str(error.value.source)
