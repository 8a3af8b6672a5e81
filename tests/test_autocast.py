"""Autocast around a capture, in forward and around calls: kept, or refused, and never lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh

BF16 = torch.bfloat16


class Normed(nn.Module):
    """Operators that autocast casts down, and up; `around` says how forward casts by itself."""

    def __init__(self, **around: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        if self.around:
            with torch.autocast(**self.around):
                x = self.up(x)
        else:
            x = self.up(x)
        return self.down(torch.relu(self.norm(x))).float().square().mean()


def inputs() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def trained(run: Callable[[], Tensor], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        loss = run()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"mesh": Mesh(one=1)}, 0.0),
        ({"mesh": Mesh(dp=2), "check": True}, 0.01),
        ({"mesh": Mesh(pp=2), "microbatches": 2}, 0.01),
    ],
    ids=str,
)
def test_around_parallelize_it_is_kept_wherever_the_module_is_called(options, tolerance) -> None:
    torch.manual_seed(0)
    model, x = Normed(), inputs()
    plain = model(x).detach()
    expected = trained(lambda: model(x), model)
    assert not torch.equal(expected[0], plain)
    with torch.autocast("cpu", BF16):
        module = ap.parallelize(model, (x,), mode="propagate", **options)

    def step(is_around: bool) -> None:
        module.zero_grad()
        with torch.autocast("cpu", BF16, enabled=is_around):
            found = [module.step(x), *module.full_grads().values()]
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())

    step(False)
    step(True)
    module.eval()  # the same program, as a capture in that mode says
    step(False)
    assert not torch.is_autocast_enabled("cpu")


class Recurrent(nn.Module):
    """Export takes the dtype of what an LSTM gives for another than autocast makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        given, _ = self.lstm(x)
        return given.float().square().mean()


def test_a_recurrent_layer_gives_other_digits() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), inputs().view(2, 4, 4)
    try:
        expected = trained(lambda: model(x), model)
    except RuntimeError as error:
        pytest.skip(f"this processor has no recurrent layer in bfloat16: {error}")
    with torch.autocast("cpu", BF16):
        module = ap.parallelize(model, (x,), mesh=Mesh(dp=2), mode="propagate")
    found = [module.step(x), *module.full_grads().values()]
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 0.02 * float(other.abs().max())


class Turned(nn.Module):
    """A product of few digits and a parameter of many, of which no bias tells."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.turn = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x)) @ self.turn).float().square().mean()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(4, 8), ap.nn.MoE(8, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.up(x))[0].float().square().mean()


@pytest.mark.parametrize("kind", [Turned, Mixture])
def test_products_of_few_digits_and_parameters(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), inputs()
    expected = trained(lambda: model(x), model)
    with torch.autocast("cpu", BF16):
        module = ap.parallelize(model, (x,), mode="propagate", mesh=Mesh(dp=2))
    found = [module.step(x), *module.full_grads().values()]
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 0.03 * float(other.abs().max())


def test_around_calls_alone_it_is_refused() -> None:
    x = inputs()
    module = ap.parallelize(Normed(), (x,), mesh=Mesh(dp=2), mode="propagate")
    loss = module.step(x)
    for call in (module, module.step):
        with (
            torch.autocast("cpu", BF16),
            pytest.raises(ap.InvalidInput, match="autocast is part of the program") as caught,
        ):
            call(x)
        assert 'torch.autocast("cpu", torch.bfloat16) around a call' in str(caught.value.got)
    assert torch.equal(module.step(x), loss)


@pytest.fixture
def cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as autocast asks."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    yield
    torch.set_autocast_enabled("cuda", False)


def refused(model: nn.Module, device: str = "cpu") -> ap.InvalidInput:
    with pytest.raises(ap.InvalidInput, match="on the device that a model is captured") as caught:
        ap.plan(model.to(device), (inputs().to(device),), mesh=Mesh(dp=2), mode="propagate")
    assert "device_type=x.device.type" in (caught.value.remedy or "")
    assert "test_autocast.py" in (caught.value.source or "")
    return caught.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there torch switches it on")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_torch_switches_off_is_refused(device: str) -> None:
    error = refused(Normed(device_type="cuda", dtype=BF16), device)
    assert "with torch.autocast(**self.around)" in (error.source or "")


@pytest.mark.usefixtures("cuda_is_there")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_casts_nothing_is_refused(device: str) -> None:
    error = refused(Normed(device_type="cuda", dtype=BF16), device)
    assert error.got == 'torch.autocast("cuda") around what is computed on the cpu'
    torch.set_autocast_enabled("cuda", True)
    assert "around a model on the cpu" in str(refused(Normed(), device).got)


def test_what_is_switched_off_on_purpose_is_no_fault() -> None:
    for device in ("cuda", "cpu"):
        model = Normed(device_type=device, dtype=BF16, enabled=False)
        ap.plan(model, (inputs(),), mesh=Mesh(dp=2), mode="propagate")


@pytest.mark.parametrize("kind", ["product", "weighted classes"])
def test_tensors_of_two_dtypes_become_one(kind: str) -> None:
    """Which torch does without values, too, where it would refuse them."""

    class Mixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
                if kind == "product":
                    return y @ self.weight.mT
                weights = torch.arange(1.0, 9.0)
                return nn.functional.cross_entropy(y, torch.arange(4), weights)

    torch.manual_seed(0)
    model, x = Mixed(8, 8), torch.randn(4, 8)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual", mode="data")
    given, wanted = module(x), model(x)
    assert given.dtype is wanted.dtype
    torch.testing.assert_close(given, wanted)


class Cell(nn.Module):
    """What autocast leaves to its parts on the CPU: products inside of it are cast alone."""

    def __init__(self, kind: type[nn.RNNCellBase], bias: bool = False) -> None:
        super().__init__()
        self.up, self.cell = nn.Linear(4, 8, bias=False), kind(8, 8, bias=bias)

    def forward(self, x: Tensor, is_mixed: bool) -> Tensor:
        with torch.autocast("cpu", BF16):
            given = self.up(x)
            first = self.cell(given.float() if is_mixed else given)
            second = self.cell(given, first)
        hidden = second[0] if isinstance(second, tuple) else second
        return hidden.float().square().sum()


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_cast_inside(kind: type[nn.RNNCellBase], is_mixed: bool) -> None:
    torch.manual_seed(0)
    model, x = Cell(kind), inputs()
    model(x, is_mixed).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = model(x, is_mixed).detach()
    module = ap.parallelize(model, (x, is_mixed), mesh=Mesh(tp=2), backend="virtual")
    torch.testing.assert_close(module.step(x, is_mixed), loss, rtol=1e-5, atol=0)
    for one, other in zip(module.full_grads().values(), expected, strict=True):
        assert float((one - other).abs().max()) <= 0.01 * float(other.abs().max())


def test_what_autocast_casts_out_of_sight_is_refused() -> None:
    class Both(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return super().forward(x, x).sum()

    with pytest.raises(ap.AutoparError, match="bilinear, inside of which it casts") as error:
        ap.parallelize(Both(4, 4, 4), (inputs(),), mesh=Mesh(dp=2), backend="virtual")
    assert "super().forward(x, x)" in str(error.value.source)
