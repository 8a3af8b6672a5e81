"""The loss is what is called so: on every backend, in micro-batches, pipelines and verify."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import autopar as ap
from autopar.verification.references import weighted_sum

WIDTH = 8


class Named(NamedTuple):
    aux: Tensor
    loss: Tensor


class Unnamed(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Registered:
    aux: Tensor
    loss: Tensor


torch.export.register_dataclass(Registered)


@dataclass
class Output(ModelOutput):
    aux: Tensor | None = None
    loss: Tensor | None = None


class Two(nn.Module):
    """Of two numbers, the second is the loss; `shape` gives them their structure."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.shape(hidden.abs().mean(), self.second(hidden).square().mean())


NAMED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dict": lambda aux, loss: {"aux": aux, "loss": loss},
    "a named tuple": Named,
    "a dataclass": Registered,
    "an output of transformers": lambda aux, loss: Output(aux=aux, loss=loss),
    "inside a tuple": lambda aux, loss: (aux, {"n": 3, "loss": loss}),
    "the outermost": lambda aux, loss: {"parts": {"loss": aux}, "loss": loss},
    "the first of a tuple": lambda aux, loss: (loss, aux),
    "the only number": lambda aux, loss: {"aux": aux.detach(), "all": loss, "no": None},
    "the only number of a tuple": lambda aux, loss: (aux[None], loss),
}
UNKNOWN: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a dict": (lambda a, b: {"a": a, "b": b}, r"a: f64\[\], b: f64\[\]"),
    "a named tuple": (Unnamed, "b: "),
    "a dict in a tuple": (lambda a, b: ({"a": a, "b": b}, a), r"0\.a: "),
    "a list in a dict": (lambda a, b: {"loss": [a, b]}, r"loss\.0: "),
    "two of the name": (lambda a, b: ({"loss": a}, {"loss": b}), r"1\.loss: "),
    "a name for no number": (lambda a, b: {"loss": a[None], "b": b}, r"loss: f64\[1\]"),
    "a name without gradient": (lambda a, b: {"loss": a.detach(), "b": b}, "loss: "),
    "a name for nothing": (lambda a, b: {"loss": None, "b": b}, "loss: None"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"mesh": ap.Mesh(dp=2)},
    "micro-batches": {"mesh": ap.Mesh(dp=2), "microbatches": 2},
    "1f1b": {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 2},
    "zb-h1": {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 2},
}


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "whole") for name in NAMED), *(("a dict", way) for way in OPTIONS if way != "whole")],
)
def test_a_step_trains_what_is_called_so(name, way):
    model, x = Two(NAMED[name]), batch()
    plain = copy.deepcopy(model)
    expected = plain.second(plain.first(x)).square().mean()
    expected.backward()
    module = ap.parallelize(model, (x,), mode="propagate", backend="virtual", **OPTIONS[way])
    torch.testing.assert_close(module.step(x), expected.detach(), rtol=1e-9, atol=0)
    found = module.full_grads()
    assert found.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [NAMED["a dict"], NAMED["an output of transformers"]])
def test_verify_differentiates_the_same(shape):
    model, x = Two(shape), batch()
    expected = model.second(model.first(x)).square().mean().item()
    found = ap.verify(model, (x,), mesh=ap.Mesh(dp=2), mode="propagate", steps=1)
    assert found.ok, found
    assert [row.expected for row in found.parallel if row.kind == "loss"] == [expected]


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "whole") for name in UNKNOWN), ("a dict", "micro-batches"), ("a dict", "1f1b")],
)
def test_a_step_is_refused_where_nothing_says_which(name, way):
    shape, got = UNKNOWN[name]
    model, x = Two(shape), batch()
    options = {"mode": "propagate", "backend": "virtual", **OPTIONS[way]}
    with pytest.raises(ap.InvalidInput, match=got) as error:
        ap.parallelize(model, (x,), **options).step(x)
    assert "returns its loss" in str(error.value)
    assert error.value.remedy is not None
    assert "'loss'" in error.value.remedy


def test_verify_then_compares_all_that_learns():
    model, x = Two(UNKNOWN["a dict"][0]), batch()
    leaves = list(model(x).values())
    found = ap.verify(model, (x,), mesh=ap.Mesh(dp=2), mode="propagate", steps=1)
    assert found.ok, found
    expected = [float(weighted_sum(leaves).detach())]
    assert [row.expected for row in found.parallel if row.kind == "loss"] == expected
