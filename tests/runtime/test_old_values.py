"""A model keeps its values when its parallel module learns, and warns of that once."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap

X = torch.arange(32.0).view(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def learned() -> tuple[Model, ap.ParallelModule]:
    model = Model()
    module = ap.parallelize(model, (X,), mesh=ap.Mesh(dp=2), backend="virtual")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)  # they are the same so far
        module.step(X)
        optimizer.step()
    return model, module


USES: list[Callable[[nn.Module], Any]] = [
    lambda model: model(X),
    lambda model: model.state_dict(),
    lambda model: model.layer(X),
]


@pytest.mark.parametrize("use", USES)
def test_a_use_of_old_values_warns_once(use: Callable[[Model], Any]) -> None:
    model, _ = learned()
    with pytest.warns(
        UserWarning, match=r"this (Model|Linear) has the values from before parallelize\(\)"
    ):
        use(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(model)


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"autopar" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)  # type: ignore[no-any-return]


def test_copies_and_models_that_learn_on_are_silent() -> None:
    model, module = learned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(model)(X)
        saved(model)(X)
        ap.parallelize(model, (X,), mesh=ap.Mesh(dp=2), backend="virtual", check=True).step(X)
        model.load_state_dict(module.full_state_dict())
        model(X)
        model, module = learned()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model(X)
