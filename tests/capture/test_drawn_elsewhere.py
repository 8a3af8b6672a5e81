"""Random numbers of Python and numpy in forward are refused: a program cannot draw them again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from random import random as by_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import Function, program
from tests.capture.support import random as numbers


class Augments(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), SimpleNamespace(**settings)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self.config, "apply_spec_augment", True):
            return self.linear(x)
        if self.config.mask_time_prob > 0:
            x = x * torch.from_numpy(masked())[:, None]
        return self.linear(x)


def masked() -> Any:
    return np.random.choice([0.0, 1.0], 4)  # the line


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * random.random(),
        lambda x: x * random.uniform(0.5, 2.0),
        lambda x: x * float(np.random.rand()),
        lambda x: x if np.random.random() < 0.1 else 2 * x,
        lambda x: x[random.sample(range(4), 4)],
        lambda x: x * by_name(),
    ],
)
def test_they_are_refused(draw: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InvalidInput, match="drawn by torch") as caught:
        capture(Function(lambda self, x: draw(self.linear(x))), (torch.randn(4, 4),))
    assert "random" in str(caught.value.got)


def test_what_switches_them_off_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        capture(Augments(mask_time_prob=0.5), (torch.randn(4, 4),))
    assert "set apply_spec_augment or mask_time_prob so that" in str(caught.value.remedy)
    assert (caught.value.source or "").endswith("# the line")
    for off in ({"apply_spec_augment": False}, {"mask_time_prob": 0.0}):
        capture(Augments(**off), (torch.randn(4, 4),))


def test_what_nobody_needs_may_be_drawn() -> None:
    def drops(self: Function, x: Tensor) -> Tensor:
        drawn, other = np.random.random(), random.uniform(0, 1)
        return x if drawn < 0.0 or other < 0 else self.linear(x)

    def seeded(self: Function, x: Tensor) -> Tensor:
        np.random.seed(3)
        return self.linear(x)[np.random.permutation(4)]

    program(drops, numbers(4, 4))
    program(seeded, numbers(4, 4))


OF_THE_FILE = np.random.default_rng(0)


def by_the_file(x: Tensor) -> Tensor:
    return x * OF_THE_FILE.uniform()


@pytest.mark.parametrize(
    "generator",
    [
        random.Random(0),
        np.random.default_rng(0),
        np.random.RandomState(0),
        [{"deep": SimpleNamespace(one=random.Random(1))}],
    ],
)
def test_generators_that_the_model_holds_are_refused(generator: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        held = generator[0]["deep"].one if isinstance(generator, list) else generator
        return self.linear(x) * float(held.random() if hasattr(held, "random") else held.rand())

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.rng = nn.Linear(4, 4), generator

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * float(self.rng.uniform(0, 1))  # of the module

    x = (torch.randn(4, 4),)
    with pytest.raises(InvalidInput, match="drawn by torch"):
        capture(Function(forward), x)
    if not isinstance(generator, list):
        with pytest.raises(InvalidInput, match=r"draws of rng, a (numpy\.)?random\.") as caught:
            capture(Holds(), x)
        assert (caught.value.source or "").endswith("# of the module")


@pytest.mark.parametrize(
    "draw",
    [
        by_the_file,
        lambda x: by_the_file(x),
        lambda x: x * random.Random().random(),
        lambda x: x * np.random.default_rng().random(),
        lambda x: x * np.random.RandomState(None).rand(),
        lambda x: x * random.SystemRandom().random(),
        lambda x: x * os.urandom(1)[0],
    ],
)
def test_generators_of_a_file_or_without_a_seed_are_refused(
    draw: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(InvalidInput, match="drawn by torch") as caught:
        capture(Function(lambda self, x: draw(self.linear(x))), (torch.randn(4, 4),))
    assert caught.value.source


def test_generators_that_forward_seeds_may_draw() -> None:
    """Each step would have the same numbers."""

    def forward(self: Function, x: Tensor) -> Tensor:
        one, other, third = random.Random(0), np.random.default_rng(1), np.random.RandomState(2)
        assert isinstance(one, random.Random)
        assert isinstance(third, np.random.RandomState)
        return self.linear(x) * float(one.random() + other.random() + third.rand())

    idle = random.Random(3)  # held, and not drawn from
    program(forward, numbers(4, 4))
    assert idle.random() == random.Random(3).random()
