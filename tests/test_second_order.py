"""Gradients of gradients are those of the plain model; outputs are the caller's own to change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.mesh import Mesh


class Two(nn.Module):
    """Two linear layers; `tail` makes the loss of what they give."""

    def __init__(self, tail: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.tail = norm or nn.Identity(), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.b(self.norm(self.a(x)).tanh()))


def squares(y: Tensor) -> Tensor:
    return y.tanh().pow(2).mean()


def classes(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.arange(8) % 4, label_smoothing=0.1)


CUTS = [
    ({}, Mesh(dp=2)),
    ({"a": ("tp", None)}, Mesh(tp=2)),
    ({"a": (None, "tp")}, Mesh(tp=2)),
    ({"a": ("tp", None), "b": (None, "tp")}, Mesh(tp=2)),
    ({"b": ("tp", None)}, Mesh(dp=2, tp=2)),
    ({"a": ("tp", "dp")}, Mesh(dp=2, tp=2)),
]


@pytest.mark.parametrize(("cuts", "mesh"), CUTS)
@pytest.mark.parametrize("kind", ["squares", "classes", "batch norm", "RMS norm"])
def test_a_penalty_on_gradients(kind: str, cuts: dict[str, tuple], mesh: Mesh) -> None:
    torch.manual_seed(0)
    norms = {"batch norm": nn.BatchNorm1d(8), "RMS norm": nn.RMSNorm(8)}
    model = Two(classes if kind == "classes" else squares, norms.get(kind)).double()
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    for name, dims in cuts.items():
        ap.shard(model.get_submodule(name), params={"weight": dims})
    module = ap.parallelize(model, (x,), mode="propagate", mesh=mesh, backend="virtual")
    found = _penalised(module, x)
    wanted = _penalised(plain, x)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def _penalised(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
    ((slope.norm() - 1) ** 2 + loss).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found | {"loss": loss.detach(), "slope": slope.detach()}


class ByHand(nn.Module):
    """What a layer gives goes through something whose backward is written by hand."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.call = nn.Linear(6, 6), call

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(self.first(x))
        return (y * torch.arange(y.numel()).view(y.shape)).sum()


def normed(y: Tensor) -> Tensor:
    return ap.shard(F.group_norm, ((None, None, "sp"),))(y, 2)


def dropped(y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)


def summed(y: Tensor) -> Tensor:
    return ap.shard(torch.cumsum, ((None, "sp", None),))(y, 1)


@pytest.mark.parametrize("call", [normed, dropped, summed])
def test_a_gradient_by_hand_has_none_of_its_own(call: Callable[[Tensor], Tensor]) -> None:
    """Refused, though a constant came to it; what is linear depends on nothing else."""
    model = ByHand(call).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    module = ap.parallelize(model, (x,), mode="propagate", mesh=Mesh(sp=2), backend="virtual")
    if call is not summed:
        with pytest.raises(ap.InvalidInput, match="differentiated by hand"):
            _penalised(module, x)
        return
    found, wanted = _penalised(module, x), _penalised(plain, x)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(tp=2)])
def test_an_output_is_changed_in_place(mesh: Mesh) -> None:
    model = Two(squares).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    module = ap.parallelize(model, (x,), mode="propagate", mesh=mesh, backend="virtual")
    for one in (module, plain):
        loss = one(x)
        loss /= 4
        loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(module.full_grads()[name], parameter.grad)


@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("operator", [torch.addmm, torch.addbmm, torch.baddbmm, torch.addmv])
def test_what_beta_leaves_out_has_a_gradient_of_zeros(operator: Callable[..., Tensor]) -> None:
    shapes = {
        torch.addmm: ((4, 4), (4, 4)),
        torch.addbmm: ((4, 4), (2, 4, 4), (2, 4, 4)),
        torch.baddbmm: ((2, 4, 4), (2, 4, 4), (2, 4, 4)),
        torch.addmv: ((4,), (4, 4), (4,)),
    }[operator]
    first, *others = shapes
    other = [torch.randn(shape, dtype=torch.float64) for shape in others]

    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(first, dtype=torch.float64))
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            right = [self.scale * value for value in other]
            arguments = [x, *right] if operator is torch.addmm else right
            return operator(self.bias, *arguments, beta=0).sum() + x.sum()

    x = torch.randn(4, 4, dtype=torch.float64)
    module = ap.parallelize(Left(), (x,), mode="propagate", mesh=Mesh(dp=2), backend="virtual")
    module.step(x)
    assert module.full_grads()["bias"].eq(0).all()
