"""Programs whose way depends on what is no input: attributes, caches, which parameters learn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests.outputs import assert_close, gradients
from tests.sized_programs import inputs_of

WIDTH = 4
ONE: dict[str, Any] = {"mesh": ap.Mesh(one=1)}


class Longest(nn.Module):
    """Keeps the greatest length so far, and does with it what its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.longest, self.up = kind, 7, nn.Linear(WIDTH, WIDTH)
        self.lengths: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        y, length = self.up(x), x.shape[1]
        if self.kind == "not read":
            self.longest = length
            return y.square().mean()
        if self.kind == "entries":
            if length not in self.lengths:
                self.lengths[length] = len(self.lengths)
            return (y * (1 + self.lengths[length])).square().mean()
        if length > self.longest:
            self.longest = length
        if self.kind == "factor":
            y = y * self.longest
        if self.kind == "branch" and self.longest > 10:
            y = y.sin()
        if self.kind == "goes back" and length < 7 < self.longest:
            self.longest = 7
        return y.square().mean()


class Learning(nn.Module):
    """Goes another way where a parameter is frozen, as its kind asks for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.other = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        learns = {
            "parameter": self.up.weight.requires_grad,
            "activation": y.requires_grad,
            "history": y.grad_fn is not None,
            "leaf": not y.is_leaf,
        }[self.kind]
        return self.other(y * (2 if learns else 1)).square().mean()


class Adding(nn.Module):
    """Adds to two caches."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Any, second: Any) -> Any:
        first.update(self.up(x), x, 0)
        second.update(x, self.up(x), 0)
        return first, second


class Emptying(nn.Module):
    """Changes a list, and reads another one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: list[Tensor], second: list[Tensor]) -> Tensor:
        first.append(x * 2)
        return self.up(sum(second)).mean()  # type: ignore[call-overload,no-any-return]


def parallel(model: nn.Module, *args: Any) -> ap.ParallelModule:
    return ap.parallelize(copy.deepcopy(model), args, **ONE)


def stays_right_or_is_refused(kind: str) -> None:
    """Calls of several lengths give what the model does, or are refused and change nothing."""
    model = Longest(kind).double()
    module = parallel(model, inputs_of(4))
    refused = 0
    for length in (4, 5, 6, 12, 5, 7, 4, 15, 6, 12):
        x, trial = inputs_of(length), copy.deepcopy(model)
        loss = trial(x)
        try:
            step = module.step(x)
        except ap.InvalidInput:
            refused += 1
            continue
        model = trial
        assert_close(step, loss.detach())
        assert module.longest == model.longest
    assert (refused > 0) == (kind != "not read")


def follows_what_learns(kind: str) -> None:
    """A step goes the model's way after parameters were frozen, and after they learn again."""
    model = Learning(kind).double()
    module = parallel(model, inputs_of(4))
    for learns in (True, False, True):
        for each in (model, module):
            each.requires_grad_(True)
            each.up.requires_grad_(learns)
        for length in (4, 5, 6, 7, 4):
            x = inputs_of(length)
            for each in (model, module):
                each.zero_grad()
            loss = model(x)
            loss.backward()
            assert_close(module.step(x), loss.detach())
            assert_close(module.full_grads(), gradients(model))


def refuses_a_shared_cache() -> None:
    """One cache in two arguments is refused where forward fills it, first or later."""
    transformers = pytest.importorskip("transformers")
    x = torch.ones(2, 1, 3, WIDTH, dtype=torch.float64)

    def cache() -> Any:
        filled = transformers.DynamicCache()
        filled.update(x, x, 0)
        return filled

    model, shared = Adding().double(), cache()
    with torch.no_grad():
        with pytest.raises(ap.InvalidInput, match="given once"):
            parallel(model, x, shared, shared)
        module = parallel(model, x, cache(), cache())
        module(x, cache(), cache())
        with pytest.raises(ap.InvalidInput, match="given once"):
            module(x, shared, shared)
    assert shared.get_seq_length() == 3


def refuses_a_shared_list() -> None:
    """One list in two arguments is refused where forward adds to it."""
    x, model = torch.ones(2, WIDTH, dtype=torch.float64), Emptying().double()
    module, shared = parallel(model, x, [x], [x]), [x]
    expected = model(x, [x], [x])
    with torch.no_grad():
        assert_close(module(x, [x], [x]), expected.detach())
        with pytest.raises(ap.InvalidInput, match="given once"):
            module(x, shared, shared)
    assert len(shared) == 1
