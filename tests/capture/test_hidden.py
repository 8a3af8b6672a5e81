"""Tensors of equal blocks that export does not see: whoever looks for one is noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, export, repeated
from autopar.errors import InvalidInput
from tests import models
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
    "compared": lambda model: float(model.layers[-1].inner._parameters == {}),
    "put together": lambda model: len(model.layers[-1].inner._parameters | {"more": 0}),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_forward_that_looks_at_them_finds_them(
    look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Looks(LOOKS[look])
    both(monkeypatch, model, (X,))


class Penalised(Net):
    """Its call is its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + _penalty(self)


def _penalty(model: nn.Module) -> Tensor:
    return torch.stack([one.square().sum() for one in model.parameters()]).sum()


def _of_hook() -> nn.Module:
    model = nn.Sequential(Net(count=MANY))
    model.register_forward_hook(lambda module, args, out: out + _penalty(module))
    return model


@pytest.mark.parametrize("made", [lambda: Penalised(count=MANY), _of_hook])
def test_what_looks_at_them_around_a_forward_finds_them(
    made: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    both(monkeypatch, model, (X,))
    looked = capture(model, (X,))
    sums = [node for node in looked.graph.nodes if node.target is torch.ops.aten.sum.default]
    assert len(sums) >= len(list(model.parameters()))


class Swapping(Net):
    """Has another function in the place of one, until its end, and counts in a thing of its own."""

    def __init__(self) -> None:
        super().__init__(ReadsIndex, MANY)
        self.kept = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        plain, torch.relu = torch.relu, torch.tanh
        self.kept.calls += 1
        x = super().forward(x) * self.kept.calls
        torch.relu = plain
        return x


def test_what_is_followed_again_begins_as_what_was_followed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, model = torch.relu, Swapping()
    both(monkeypatch, model, (X,))
    assert torch.relu is plain
    assert model.kept.calls == 0


def test_one_that_is_kept_elsewhere_is_refused_as_it_is_of_few_blocks() -> None:
    model = Looks(lambda model: model.weights[-1].square().sum())
    with pytest.raises(InvalidInput, match="every tensor comes from an input, a parameter"):
        capture(model, (X,))


def test_blocks_that_have_to_be_followed_are_followed_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert both(monkeypatch, Net(ReadsIndex, MANY), (X,)) == []


def test_export_sees_those_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = export.exported, list[int]()

    def seeing(*args: Any, **kwargs: Any) -> Any:
        program = kept(*args, **kwargs)
        seen.append(len(program.graph_signature.parameters))
        return program

    monkeypatch.setattr(export, "exported", seeing)
    model = Net(count=MANY)
    short, long = capture(Net(count=repeated.SHOWN), (X,)), capture(model, (X,))
    assert len(long.parameters) - len(short.parameters) == 4 * (MANY - repeated.SHOWN)
    assert seen[0] == seen[1]
    assert len(list(model.parameters())) == len(long.parameters)


class Turned(Net):
    """Has a buffer that is not saved, which export keeps among constants."""

    def __init__(self) -> None:
        super().__init__(count=MANY)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.angles)


def test_models_that_hide_some_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = export.exported, list[nn.Module]()

    def seeing(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(model)
        return kept(model, *args, **kwargs)

    monkeypatch.setattr(export, "exported", seeing)
    for case in (models.gpt2(layers=MANY), models.llama(layers=MANY)):
        capture(case.model, case.args, case.kwargs)
    capture(Turned(), (X,))
    assert len(seen) == 3
