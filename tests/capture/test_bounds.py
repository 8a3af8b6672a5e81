"""Parameters that forward puts between bounds before it reads them are those of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput


def _data(weight: Tensor) -> None:
    weight.data.clamp_(-0.1, 0.1)


def _set(weight: Tensor) -> None:
    weight.data = weight.data.clamp(max=0.1)


def _no_grad(weight: Tensor) -> None:
    with torch.no_grad():
        weight.clamp_min_(-0.1)


def _copied(weight: Tensor) -> None:
    with torch.no_grad():
        weight.detach().copy_(weight.clamp(-0.1, 0.1))


class Bounds(nn.Module):
    def __init__(self, bound: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                self.bound(layer.weight)
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.parametrize("bound", [_data, _set, _no_grad, _copied])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=2, tp=2)},
        {"mesh": ap.Mesh(dp=2), "states": "zero3"},
        {"mesh": ap.Mesh(pp=2), "microbatches": 2, "schedule": "gpipe"},
    ],
)
def test_steps_are_those_of_the_model(
    bound: Callable[[Tensor], None], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, x = Bounds(bound).double(), torch.randn(4, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    module = ap.parallelize(model, (x,), backend="virtual", **options)
    ours = torch.optim.SGD(module.parameters(), lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        loss, expected = module.step(x), plain(x)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        gradients = module.full_grads()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(module.full_state_dict(), dict(plain.state_dict()))
    module.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))  # what has left its bounds since
    torch.testing.assert_close(module.full_state_dict(), dict(plain.state_dict()))


def test_calls_before_a_backward_bound_once() -> None:
    torch.manual_seed(0)
    model, x = Bounds(_data).double(), torch.randn(4, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    (module(x) + module(2 * x)).backward()
    (plain(x) + plain(2 * x)).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(module.full_grads()[name], parameter.grad)


def test_in_another_precision_masters_are_bounded() -> None:
    model, x = Bounds(_data), torch.randn(4, 8)
    half = ap.Precision(compute=torch.bfloat16)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), precision=half, backend="virtual")
    module.step(x)
    for name, value in module.full_state_dict().items():
        assert name.endswith("bias") or value.abs().max() <= 0.1


def test_verify_bounds_all_three() -> None:
    model, x = Bounds(_data), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    assert ap.verify(model, (x,), mesh=ap.Mesh(dp=2)).ok
    torch.testing.assert_close(model.state_dict(), before)


def _read_before(self: Any, x: Tensor) -> Tensor:
    before = self.weight.sum()
    self.weight.data.clamp_(-0.1, 0.1)
    return self.plain(x).sum() + before


def _doubled(self: Any, x: Tensor) -> Tensor:
    self.weight.data.mul_(0.5)
    return self.plain(x).sum()


def _a_part(self: Any, x: Tensor) -> Tensor:
    self.weight.data[0].clamp_(-0.1, 0.1)
    return self.plain(x).sum()


def _by_values(self: Any, x: Tensor) -> Tensor:
    self.weight.data.clamp_(max=x.amax())
    return self.plain(x).sum()


def _by_another(self: Any, x: Tensor) -> Tensor:
    self.weight.data = self.bias.data.clamp(-0.1, 0.1).expand(4, 4)
    return self.plain(x).sum()


def _twice(self: Any, x: Tensor) -> Tensor:
    self.weight.data.clamp_(-0.1, 0.1)
    y = self.plain(x)
    self.weight.data.clamp_(-0.05, 0.05)
    return self.plain(y).sum()


@pytest.mark.parametrize(
    "forward", [_read_before, _doubled, _a_part, _by_values, _by_another, _twice]
)
def test_other_writes_are_refused(forward: Any) -> None:
    kind = type("Model", (nn.Linear,), {"forward": forward, "plain": nn.Linear.forward})
    with pytest.raises(InvalidInput, match="changes only") as error:
        capture(kind(4, 4), (torch.randn(4, 4),))
    assert "self.weight.data" in str(error.value.source)


def test_a_write_around_autograd_is_refused() -> None:
    class Around(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.data = y.data.clamp(-0.1, 0.1)
            return y.square().sum()

    with pytest.raises(InvalidInput, match="write to a view") as error:
        capture(Around(4, 4), (torch.randn(4, 4),))
    assert "y.data = " in str(error.value.source)


def test_data_that_is_set_to_another_shape_is_refused() -> None:
    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = torch.zeros(4, 4, dtype=x.dtype)[:, :2]
            return super().forward(x).sum()

    with pytest.raises(InvalidInput, match="set to in forward has the shape") as error:
        capture(Other(4, 4), (torch.randn(4, 4),))
    assert "self.weight.data = " in str(error.value.source)


def test_data_that_is_read_is_detached() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.data)
            return (y - y.data.amax()).exp().sum() * self.weight.data.sum()

    model, x = Reads(4, 4).double(), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert ap.verify(model, (x,), mesh=ap.Mesh(dp=2)).ok
