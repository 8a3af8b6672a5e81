"""A model that asks whether it is exported or compiled is captured as what it is in a plain run."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.external_utils
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import Function, program, random, targets, text


def asks(self: Function, x: Tensor) -> Tensor:
    y = self.linear(x)
    if not torch.compiler.is_exporting() and not torch.compiler.is_compiling():
        y = y.tril()
    if not is_exporting() and not is_compiling():  # imported by name
        y = y.tanh()
    if not torch._dynamo.external_utils.is_compiling():  # which asks the first
        y = y.relu()
    return y.sum()


def test_the_program_is_the_plain_model() -> None:
    found = text(asks, random(4, 4))
    assert "tril" in found
    assert "tanh" in found
    assert "relu" in found


def test_masks_that_are_the_same_in_every_batch_are_looked_at() -> None:
    def masks(self: Function, x: Tensor, given: Tensor) -> Tensor:
        y = self.linear(x)
        for mask in (torch.ones(4, dtype=torch.bool), given > 0, x > 0):
            kind = vars(torch)["_subclasses"].FakeTensor
            if isinstance(mask, kind) or not mask.all():
                y = y * mask.to(y) + y.sin()
        return y

    captured = program(masks, random(4, 4), torch.zeros(4))
    assert targets(captured).count("sin") == 2
    assert not captured.decisions


def test_torch_is_told_the_truth() -> None:
    def compiles(self: Function, x: Tensor) -> Tensor:  # which torch leaves to who exports it
        return torch.compile(torch.relu, backend="eager")(self.linear(x))

    assert "relu" in text(compiles, random(4, 4))


def test_questions_are_answered_as_before_after_a_failure() -> None:
    def fails(self: Function, x: Tensor) -> Tensor:
        raise KeyError("no such layer")

    with pytest.raises(InvalidInput):
        capture(Function(fails), (random(4, 4),))
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_compiling(), is_exporting()))
            return x

    torch.export.export(Asks(), (torch.ones(2),), strict=False)
    assert seen[0] == (True, True)
    assert (is_compiling(), is_exporting()) == (False, False)
