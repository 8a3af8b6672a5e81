"""An autograd.Function is an operator with its own backward, and a rule where one is given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput
from autopar.strategies import register_rule
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome


class Rounded(Function):
    """Steps whose gradient is that of a line, as far as it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.slope * (x.abs() < 1), None


class Pair(Function):
    """Two results, of which one may go nowhere."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y * 2 + total, product * x + total * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = Rounded.apply(self.first(x), 0.5)
        z = Rounded.apply(self.second(y), 2.0)
        product, total = Pair.apply(y, z)
        return (product * total).sum() + Pair.apply(z, y)[1].square().sum()


def case() -> Case:
    torch.manual_seed(0)
    return Case("functions", Net().double(), (torch.randn(8, 4, dtype=torch.float64),))


def names(captured: Any) -> list[str]:
    return [str(node.target) for node in captured.operators if "own_functions" in str(node.target)]


def test_each_is_an_operator_with_its_backward() -> None:
    one = case()
    rounded, pair = "own_functions.Rounded.default", "own_functions.Pair.default"
    assert names(capture(one.model, one.args)) == [rounded, rounded, pair, pair]
    assert ap.verify(one.model, one.args, mesh=ap.Mesh(dp=2, tp=2), mode="propagate").ok


def test_a_rule_cuts_it() -> None:
    one = case()
    register_rule(Rounded, "... -> ...")
    register_rule(Pair, "..., ... -> ..., ...")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that something runs replicated
        module = ap.parallelize(
            one.model, one.args, mesh=ap.Mesh(dp=2), mode="propagate", backend="virtual", check=True
        )
    assert_equal(parallel_outcome(module, one), single_outcome(one.fresh()))


class Reversed(Function):
    """The identity, as a view; its gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class Power(Function):
    """Keeps what it gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, value := (x * y).exp())
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, value = ctx.saved_variables  # the older name
        return grad * value * y, grad * value * x


def test_what_is_given_back_as_a_view() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(Reversed.apply(self.first(x), 0.5)).square().sum()

    assert ap.verify(Model().double(), case().args, mesh=ap.Mesh(dp=2, tp=2)).ok


class Half(Function):
    """Gives one of its arguments no gradient; its backward has the other name it may have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return grad * y, None


def test_what_gets_none_has_no_gradient() -> None:
    register_rule(Half, "..., ... -> ...")

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Half.apply(self.first(x), self.second(x)).sum()

    assert_parity(Case("none", Model().double(), case().args), ap.Mesh(dp=2))


def test_a_gradient_has_gradients() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).tanh()
            return (self.second(Reversed.apply(y, 0.5)) * Power.apply(y, y)).sum()

    model, (x,) = Model().double(), case().args
    module = ap.parallelize(model, (x.requires_grad_(),), mesh=ap.Mesh(dp=2), backend="virtual")

    def penalised(one: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(one(x), [x], create_graph=True)
        return slope.square().sum()

    penalised(model).backward()
    penalised(module).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.full_grads()[name], parameter.grad)


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        return (wide @ weight.t()).to(x.dtype), x.float().t() @ wide


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_autocast_is_part_of_it() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return Product.apply(self.first(x), self.second.weight)

    model, x = Model(), torch.randn(8, 4)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    given, wanted = module(x), model(x)
    assert given.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(given, wanted)


def test_a_plan_knows_what_it_is_called_with() -> None:
    one = case()
    plan = ap.plan(one.model, one.args, mesh=ap.Mesh(dp=2))
    assert any("'0.5')" in line for line in plan.fingerprint.operators)


class Noisy(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        return Rounded.forward(ctx, x + torch.rand_like(x), slope)


class Written(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Counting(Rounded):
    """Writes to what is no gradient's, and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        x.detach().mul_(1)
        return Rounded.forward(ctx, x, slope)


class Deciding(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        return Rounded.forward(ctx, x, slope) if x.sum() > 0 else x


class Numbered(Rounded):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        Numbered.calls += 1
        return Rounded.forward(ctx, x * Numbered.calls, slope)


TOTAL = torch.zeros(4, dtype=torch.float64)


class Summing(Rounded):
    """Backward writes to what is around it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        TOTAL.add_(1.0)
        return Rounded.backward(ctx, grad)


@pytest.mark.parametrize("function", [Noisy, Written, Counting, Deciding, Numbered, Summing])
def test_others_are_refused(function: Any) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return function.apply(self.first(x), 1.0).sum()  # the line

    with pytest.raises(InvalidInput, match="one written by hand belongs to an operator") as error:
        capture(Model().double(), case().args)
    assert "# the line" in str(error.value.source)
    assert not TOTAL.any()


class Mapped(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_one_that_is_mapped_is_refused() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(Mapped.apply)(self.first(x)).sum()

    with pytest.raises(InvalidInput, match="one written by hand belongs to an operator") as error:
        capture(Model().double(), case().args)
    assert "mapped, as by torch.vmap" in str(error.value.got)


class Unruled(Rounded):
    """One that knows how many elements there are, so that it is not known how it may be cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        return Rounded.forward(ctx, x, slope) * x.numel()


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Unruled.apply(self.layer(x), 0.5).square().mean()


def test_one_without_a_rule_says_by_which_it_would_be_cut_into_micro_batches() -> None:
    with pytest.raises(InvalidInput) as caught:
        ap.plan(Rounding(), (torch.ones(4, 4),), mesh=ap.Mesh(dp=1), microbatches=2)
    assert 'register_rule(Unruled, "... -> ...") cuts it' in caught.value.remedy
