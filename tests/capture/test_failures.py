"""A model that cannot be captured says the rule, what was given, a remedy and the line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import autopar as ap
from autopar.capture import capture
from autopar.errors import AutoparError, InvalidInput
from autopar.strategies import register_rule
from tests.capture.support import Function


def branch(self: Function, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line
        return x
    return self.linear(x)


def item(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) * x.sum().item()  # the line


def integer(self: Function, x: Tensor) -> Tensor:
    for _ in range(int(x.sum())):  # the line
        x = self.linear(x)
    return x


def numpy(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) * float(x.detach().numpy().sum())  # the line


def selection(self: Function, x: Tensor) -> Tensor:
    return self.linear(x)[x > 0].sum()  # the line


def nonzero(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) * x.nonzero().shape[0]  # the line


def formatted(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) * len(f"{x.sum():.2f}")  # the line


def least_squares(self: Function, x: Tensor) -> Tensor:
    return torch.linalg.lstsq(self.linear(x), x).solution.sum()  # the line


def own_error(self: Function, x: Tensor) -> Tensor:
    raise KeyError("no such layer")  # the line


def shapes(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) @ x  # the line


def attribute(self: Function, x: Tensor) -> Tensor:
    return self.linear(x).nope  # the line


def layer(self: Function, x: Tensor) -> Tensor:
    return self.linear(x[:, 1:])  # the line


def followed(self: Function, x: Tensor) -> Tensor:
    if get_proxy_mode() is not None:
        raise ValueError("not while this is followed")  # the line
    return self.linear(x)


def beyond(self: Function, x: Tensor) -> Tensor:
    return self.linear(x) + self.linear.weight[torch.arange(2, 5) - 7]  # the line


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round() + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def own_backward(self: Function, x: Tensor) -> Tensor:
    x = Straight.apply(x)  # no gradient flows to an input
    return Straight.apply(self.linear(x))  # the line


def written_input(self: Function, x: Tensor) -> Tensor:
    x.mul_(self.linear.weight.detach().sum())  # the line
    return self.linear(x)


def written_parameter(self: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.mul_(2)  # the line
    return self.linear(x)


def around(self: Function, x: Tensor) -> Tensor:
    weight = Tensor._make_subclass(Tensor, self.linear.weight.detach())
    return self.linear(x) + weight.sum()  # the line


AROUND = "every tensor comes from an input, a parameter, a buffer or an operator"
VALUES = "forward must not depend on the values of tensors, only on their shapes"
WRITES = "forward changes only buffers and its own intermediate values"
GRADIENTS = (
    "gradients are those of the operators of forward; one written by hand belongs to an operator"
)
ROWS = "rows that are looked up in a table are there"
RUNS = "the model runs on the example inputs"
FOLLOWS = "torch.export can follow forward on the example inputs"
SHAPES = "torch can tell the shape of every result without its values"


@pytest.mark.parametrize(
    ("function", "rule", "given"),
    [
        (branch, VALUES, "a Python decision"),
        (item, VALUES, "item, whose result depends on values"),
        (integer, VALUES, "a Python decision"),
        (numpy, VALUES, "a tensor handed to numpy"),
        (selection, VALUES, "index, whose result depends on values"),
        (nonzero, VALUES, "nonzero, whose result depends on values"),
        (formatted, VALUES, "an operation that reads the memory of a tensor"),
        (least_squares, SHAPES, "aten.linalg_lstsq.default"),
        (own_error, RUNS, "KeyError in Function: 'no such layer'"),
        (shapes, RUNS, "RuntimeError in Function: a and b must have same reduction dim"),
        (attribute, RUNS, "AttributeError in Function: 'Tensor' object has no attribute 'nope'"),
        (layer, RUNS, "RuntimeError in linear, a Linear: a and b must have same reduction dim"),
        (followed, FOLLOWS, "ValueError in Function: not while this is followed"),
        (around, AROUND, "a tensor that was made around"),
        (beyond, ROWS, "row -5 of 4: index in the model"),
        (own_backward, GRADIENTS, "Straight, a torch.autograd.Function"),
        (written_input, WRITES, "an input (args_0) is changed in place by aten.mul_"),
        (written_parameter, WRITES, "a parameter (p_linear_weight) is changed in place"),
    ],
)
def test_errors_of_forward(
    function: Callable[..., Any], rule: str, given: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        capture(Function(function), (torch.randn(3, 4),))
    error = caught.value
    assert error.rule == rule
    assert given in str(error.got)
    assert error.remedy
    assert "test_failures.py:" in (error.source or "")
    assert "# the line" in (error.source or "")
    assert capfd.readouterr() == ("", "")


def test_what_goes_around_operators_in_a_module_is_refused_as_in_the_model() -> None:
    with pytest.raises(InvalidInput, match="made around"):
        capture(nn.Sequential(nn.Linear(4, 4), Function(around)), (torch.randn(3, 4),))


class Own:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class DynamicCache(Own):
    """As the models of transformers return beside their loss."""


@dataclass
class Result:
    x: Tensor


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (Own, "use a tuple or a dict"),
        (Result, "call torch.export.register_dataclass(Result), or use a tuple or a dict"),
        (DynamicCache, "set model.config.use_cache = False, or pass use_cache=False"),
    ],
)
def test_types_that_torch_does_not_look_into(kind: Callable[..., Any], remedy: str) -> None:
    class Made(nn.Module):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Any:  # the line
            return kind(x)

    class Taken(nn.Module):
        def forward(self, x: Any) -> Tensor:  # the line
            return x.x

    x = torch.randn(3, 4)
    for model, given, verb in ((Made(), x, "returns"), (Taken(), kind(x), "takes")):
        with pytest.raises(InvalidInput, match=f"forward {verb} tensors in tuples") as caught:
            capture(model, (given,))
        assert kind.__name__ in str(caught.value.got)  # type: ignore[attr-defined]
        assert str(caught.value.remedy).startswith(remedy)
        assert (caught.value.source or "").endswith("# the line")


def test_arrays_are_made_tensors_first() -> None:
    with pytest.raises(InvalidInput, match=r"numpy\.ndarray") as caught:
        capture(nn.Linear(4, 4), (torch.ones(3, 4).numpy(),))
    assert caught.value.remedy == "torch.from_numpy(...) makes tensors of arrays"


def test_a_mistake_in_the_inputs_is_not_blamed_on_export() -> None:
    with pytest.raises(InvalidInput, match=RUNS) as caught:
        capture(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), (torch.randn(8, 5),))
    assert "RuntimeError in 1, a Linear" in str(caught.value.got)
    assert "test_failures.py:" in (caught.value.source or "")


def test_missing_argument() -> None:
    with pytest.raises(InvalidInput, match="missing a required argument: 'target'") as caught:
        capture(Named(), (torch.randn(3, 4),))
    assert "def forward(self, x: Tensor, target: Tensor)" in (caught.value.source or "")


class Named(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return x + target


def test_batch_norm_without_momentum() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(InvalidInput, match="give batch norm a momentum"):
        capture(norm, (torch.randn(3, 4),))


def test_norms_that_write_and_do_not_say_so() -> None:
    class Quiet(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            kept = self.running_mean, self.running_var
            return torch.native_batch_norm(x, None, None, *kept, True, 0.1, 1e-5)[0]

    with pytest.raises(InvalidInput, match="writes to them and does not say so"):
        capture(Quiet(4), (torch.randn(3, 4),))


def test_lazy_modules() -> None:
    with pytest.raises(InvalidInput, match="belongs to a lazy module"):
        capture(nn.LazyLinear(4), (torch.randn(3, 4),))


def test_models_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=r"copy\.deepcopy"):
        capture(model, (torch.randn(3, 4),))


def test_what_is_not_a_model_or_arguments() -> None:
    with pytest.raises(InvalidInput, match=r"a model is a torch\.nn\.Module"):
        capture(torch.relu, (torch.randn(3),))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"\(x,\) for one input"):
        capture(nn.Linear(4, 4), torch.randn(3, 4))  # type: ignore[arg-type]


def test_a_dropped_layer_names_its_setting() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.encoder_layerdrop = nn.Linear(4, 4), 0.1

        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.rand([])
            skipped = drawn < self.encoder_layerdrop
            return x if skipped else self.linear(x)

    with pytest.raises(InvalidInput) as caught:
        capture(Dropping(), (torch.randn(3, 4),))
    assert "set encoder_layerdrop" in str(caught.value.remedy)


def test_what_nobody_foresaw_names_the_operator_and_the_line() -> None:
    @torch.library.custom_op("tests_failures::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        return x / 2

    halve.register_fake(torch.empty_like)
    register_rule(halve, lambda call: call["no such argument"])

    def with_a_wrong_rule(self: Function, x: Tensor) -> Tensor:
        return halve(self.linear(x)).sum()  # the line

    with pytest.raises(AutoparError, match="a rule is found for") as caught:
        ap.plan(Function(with_a_wrong_rule), (torch.randn(3, 4),), mesh=ap.Mesh(x=2))
    assert "halve" in str(caught.value.got)
    assert "KeyError" in str(caught.value.got)
    assert (caught.value.source or "").endswith("# the line")
    assert isinstance(caught.value.__cause__, KeyError)
