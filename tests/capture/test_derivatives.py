"""What torch.func differentiates in forward is a part of the program like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad as grad_by_name

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput

MESH = ap.Mesh(dp=2, tp=2)


class Model(nn.Module):
    def __init__(self, tail: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.tail = nn.Linear(4, 4), nn.Linear(4, 1), tail
        self.norm, self.conv = nn.LayerNorm(4), nn.Conv1d(4, 4, 3, padding=1)

    def energy(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).sum()

    def part_without(self, x: Tensor) -> Tensor:
        """Of which a part takes no gradient."""
        with torch.no_grad():
            scale = self.first.weight.sum() * x.sum()
        return self.energy(x) * scale

    def forward(self, x: Tensor) -> Any:
        return self.tail(self, x)


def _grad(self: Model, x: Tensor) -> Tensor:
    return torch.func.grad(self.energy)(x).square().mean()


def _grad_and_value(self: Model, x: Tensor) -> Tensor:
    slope, (value, other) = torch.func.grad_and_value(
        lambda z, more: (self.energy(z) * more["scale"], z.exp()), has_aux=True
    )(x, {"scale": x.mean()})
    return (slope * other).sum() + value


def _jvp(self: Model, x: Tensor) -> Tensor:
    value, along = torch.func.jvp(lambda z: self.first(z).tanh(), (x,), (x.cos(),))
    return (value * along).sum()


def _jacobian(self: Model, x: Tensor) -> Tensor:
    def outputs(z: Tensor) -> Tensor:
        return self.first(z).tanh().sum(0)

    return (torch.func.jacrev(outputs)(x) + torch.func.jacfwd(outputs)(x)).square().mean()


def _hessian(self: Model, x: Tensor) -> Tensor:
    return torch.func.hessian(self.part_without)(x).square().mean()


def _of_each(self: Model, x: Tensor) -> Tensor:
    slope, value = torch.vmap(torch.func.grad_and_value(self.part_without))(x)
    return slope.square().mean() + value.square().mean()


def _twice(self: Model, x: Tensor) -> Tensor:
    inner = torch.func.grad(self.energy)
    return torch.func.grad(lambda z: inner(z).square().sum())(x).square().mean()


def _of_parameters(self: Model, x: Tensor) -> Tensor:
    def loss(named: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.first, named, (x,)).tanh().sum()

    slopes = torch.func.grad(loss)(dict(self.first.named_parameters()))
    return self.second(x @ (self.first.weight - 0.1 * slopes["weight"]).T).square().mean()


def _drawn(self: Model, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: self.energy(F.dropout(z)))(x).square().mean()


def _inside_off(self: Model, x: Tensor) -> Tensor:
    slope, value = torch.func.grad_and_value(self.part_without)(x)
    return slope.square().mean() + value


def _around_off(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        slope = torch.func.grad(self.part_without)(x)
        each = torch.vmap(self.part_without)(x)
    return (self.first(x) * slope * each[:, None]).sum()


def _along_off(self: Model, x: Tensor) -> Tensor:
    value, along = torch.func.jvp(self.part_without, (x,), (x.cos(),))
    return value * along


def _losses(self: Model, x: Tensor) -> Tensor:
    labels = torch.arange(8) % 4

    def loss(z: Tensor) -> Tensor:
        y, target = self.first(z), z.detach()
        total = F.mse_loss(y, target) + F.huber_loss(y, target, reduction="sum")
        return total + F.cross_entropy(y, labels, label_smoothing=0.1)

    return torch.func.grad(loss)(x).square().mean()


def _layers(self: Model, x: Tensor) -> Tensor:
    def energy(z: Tensor) -> Tensor:
        return self.norm(self.conv(z[..., None].expand(-1, -1, 5)).tanh().sum(-1)).square().sum()

    return torch.func.grad(energy)(x).square().mean()


TAILS = (
    *(_grad, _grad_and_value, _jvp, _jacobian, _hessian, _of_each, _twice, _of_parameters, _drawn),
    *(_inside_off, _around_off, _along_off, _losses, _layers),
)


@pytest.mark.filterwarnings("ignore:.* has no rule and runs replicated")
@pytest.mark.parametrize("tail", TAILS)
def test_it_is_that_of_the_model(tail: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    found = ap.verify(Model(tail), (torch.randn(8, 4),), mesh=MESH)
    assert found.ok, found


def _vjp(self: Model, x: Tensor) -> Tensor:
    value, pulled = torch.func.vjp(self.energy, x)
    return pulled(torch.ones_like(value))[0].square().mean()


def _linearize(self: Model, x: Tensor) -> Tensor:
    return torch.func.linearize(self.energy, x)[0]


def _by_name(self: Model, x: Tensor) -> Tensor:
    return grad_by_name(self.energy)(x).square().mean()


def _of_values(self: Model, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(self.energy(x), x, create_graph=True)[0].square().mean()


def _functional(self: Model, x: Tensor) -> Tensor:
    return torch.autograd.functional.jvp(self.energy, x, x.cos(), create_graph=True)[1]


def _dual(self: Model, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        return forward_ad.unpack_dual(self.energy(dual)).tangent


@pytest.mark.parametrize("tail", [_vjp, _linearize, _by_name, _of_values, _functional, _dual])
def test_other_ways_are_refused(tail: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(InvalidInput, match="forward differentiates functions") as error:
        capture(Model(tail), (torch.randn(8, 4),))
    assert "test_derivatives.py" in str(error.value.source)
