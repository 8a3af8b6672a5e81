"""Tensors of equal blocks that export does not see: whoever looks for one is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, repeated
from autopar.errors import InvalidInput
from tests.capture.test_repeated import Net, ReadsIndex, X, both

MANY = repeated.MANY + 2


class Looks(Net):
    """Reads tensors of its blocks itself."""

    def __init__(self, look: Callable[[Looks], Any]) -> None:
        super().__init__(count=MANY)
        self.look = look
        self.weights = [layer.inner.weight for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.look(self)


def _tried(model: Looks) -> Any:
    try:
        return model.layers[-1].inner.weight.square().sum()
    except AttributeError:
        return 0.0


LOOKS: dict[str, Callable[[Looks], Any]] = {
    "all": lambda model: sum(one.square().sum() for one in model.parameters()),
    "one": lambda model: model.layers[-1].inner.weight.square().sum(),
    "tried": _tried,
    "asked for": lambda model: 2.0 if hasattr(model.layers[-1].inner, "weight") else 1.0,
    "by name": lambda model: model.get_parameter(f"layers.{MANY - 1}.norm.bias").sum(),
    "state": lambda model: len(model.state_dict()),
    "counted": lambda model: len(model.layers[-1].inner._parameters),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_forward_that_looks_at_them_finds_them(
    look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Looks(LOOKS[look])
    both(monkeypatch, model, (X,))


def test_one_that_is_kept_elsewhere_is_refused_as_it_is_of_few_blocks() -> None:
    model = Looks(lambda model: model.weights[-1].square().sum())
    with pytest.raises(InvalidInput, match="every tensor comes from an input, a parameter"):
        capture(model, (X,))


def test_blocks_that_have_to_be_followed_are_followed_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert both(monkeypatch, Net(ReadsIndex, MANY), (X,)) == []


def test_export_sees_those_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = torch.export.export, list[int]()

    def seeing(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(list(model.parameters())))
        return kept(model, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", seeing)
    model = Net(count=MANY)
    short, long = capture(Net(count=repeated.SHOWN), (X,)), capture(model, (X,))
    assert len(long.parameters) - len(short.parameters) == 4 * (MANY - repeated.SHOWN)
    assert seen[0] == seen[1]
    assert len(list(model.parameters())) == len(long.parameters)
