"""A parameter is itself, however forward reaches it: past attributes, or as a view made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.precision import Precision
from tests.models import Case, _case
from tests.parity import assert_equal, parallel_outcome, single_outcome

MESHES = [ap.Mesh(dp=2), ap.Mesh(tp=2), ap.Mesh(pp=2)]
Read = Callable[["Net", Tensor], Tensor]


class Variable:
    """A tensor of a library that has its own, as Keras does."""

    def __init__(self, value: nn.Parameter) -> None:
        self._value = value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [one._value if isinstance(one, Variable) else one for one in args]
        return function(*args, **(kwargs or {}))


class Rebuilt(nn.Module):
    """A module that is pickled by what it was made of, as those of Keras are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.randn(size, size))

    def __reduce__(self) -> Any:
        return Rebuilt, (self.size,)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Net(nn.Module):
    """Two layers, the first of which is `read` past its attributes."""

    def __init__(self, prepare: Callable[[Net], Any], read: Read) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.rebuilt = nn.BatchNorm1d(8), Rebuilt(8)
        self.read = read
        self.double()
        self.kept = prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.read(self, x))
        return self.last(x).square().sum() / 32


WEIGHT: dict[str, nn.Parameter] = {}
CASES: dict[str, tuple[Callable[[Net], Any], Read]] = {
    "closure": (lambda net: lambda: net.first.weight, lambda net, x: x @ net.kept()),
    "list": (lambda net: [net.first.weight], lambda net, x: x @ net.kept[0]),
    "object": (lambda net: Variable(net.first.weight), lambda net, x: torch.mm(x, net.kept)),
    "global": (
        lambda net: WEIGHT.update(first=net.first.weight),
        lambda net, x: x @ WEIGHT["first"],
    ),
    "partial": (
        lambda net: partial(nn.functional.linear, weight=net.first.weight),
        lambda net, x: net.kept(x) + net.first.bias,
    ),
    "module": (lambda net: lambda x: net.norm(net.first(x)), lambda net, x: net.kept(x)),
    "rebuilt": (lambda net: None, lambda net, x: net.rebuilt(x)),
    "view": (lambda net: net.first.weight[:4], lambda net, x: x @ net.kept.t() @ net.kept),
    "views": (
        lambda net: [
            net.first.weight.t(),
            net.first.weight[1:5, ::2],
            net.first.weight[2],
            net.first.weight[:, None, 3],
            net.first.weight.view(-1)[4:20].view(4, 4),
            net.first.weight.view(2, 4, 8),
        ],
        lambda net, x: x + sum((at + 1) * one.mean() for at, one in enumerate(net.kept)),
    ),
    "without a gradient": (
        lambda net: net.first.weight.detach()[2:],
        lambda net, x: net.first(x) + net.kept.sum(),
    ),
}


def case(name: str) -> Case:
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return _case(name, lambda: Net(*CASES[name]), (x,))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_model(name: str, mesh: ap.Mesh) -> None:
    if mesh == MESHES[2] and name == "module":
        pytest.skip("statistics of a batch in a pipeline are those of its micro-batches")
    one = case(name)
    module = ap.parallelize(one.model, one.args, mesh=mesh, backend="virtual", microbatches=1)
    found = parallel_outcome(module, one, 3)
    assert_equal(found, single_outcome(case(name), 3))


@pytest.mark.parametrize("name", ["closure", "list", "module", "view"])
def test_another_mode_reads_the_same(name: str) -> None:
    one = case(name)
    module = ap.parallelize(one.model, one.args, mesh=ap.Mesh(dp=2), backend="virtual", check=True)
    module.step(*one.args)
    torch.optim.SGD(module.parameters(), 0.1).step()
    found = module.eval()(one.args[0][:4])
    plain = case(name).model.eval()
    plain.load_state_dict(module.full_state_dict())
    assert abs(float((found - plain(one.args[0][:4])).detach())) < 1e-12


@pytest.mark.parametrize("name", ["closure", "view", "object"])
def test_it_has_the_precision_and_the_device_of_the_program(name: str) -> None:
    one = case(name)
    captured = capture(one.model, one.args, precision=Precision(compute=torch.bfloat16))
    assert not captured.constants
    with torch.device("meta"):
        assert not capture(Net(*CASES[name]), one.args).constants


def test_verify_compares_with_the_plain_model() -> None:
    with torch.random.fork_rng():
        one = case("closure")
    model = one.model.float()
    assert ap.verify(model, (one.args[0].float(),), mesh=ap.Mesh(dp=2)).ok


UNKNOWN: dict[str, tuple[Callable[[Net], Any], Read, str]] = {
    "module in a list": (
        lambda net: [nn.Linear(8, 8, dtype=torch.float64)],
        lambda net, x: net.kept[0](x),
        "kept, which learns and is no parameter",
    ),
    "computed before": (
        lambda net: net.first.weight * 2,
        lambda net, x: x @ net.kept,
        "kept, which was computed from parameters",
    ),
    "diagonal": (
        lambda net: net.first.weight.diagonal(),
        lambda net, x: x * net.kept,
        "kept, in the memory of first.weight",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_learns_and_is_registered_nowhere_is_refused(name: str) -> None:
    prepare, read, said = UNKNOWN[name]
    with pytest.raises(ap.InvalidInput, match=said) as refused:
        capture(Net(prepare, read), case("list").args)
    assert "lambda net, x" in str(refused.value.source)
