"""Tensors that are not plain are refused by name, where they are parameters, buffers or inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Scaled(Tensor):
    """Whole numbers and a scale, that compute in their own way."""

    values: Tensor
    scale: float

    @staticmethod
    def __new__(cls, values: Tensor, scale: float) -> Scaled:
        made = Tensor._make_wrapper_subclass(cls, values.shape)  # type: ignore[attr-defined]
        made.values, made.scale = values, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(function)


class Halved(Tensor):
    """One that has its own functions, none of which is called before it is refused."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(function)


class Renamed(Tensor):
    """One that computes as torch does."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        return (self.linear(rows) * scale).square().sum()


def parallel(model: nn.Module, *args: Any) -> Any:
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=2), "mode": "data", "backend": "virtual"}
    return ap.parallelize(model, args or (X,), **options)


def scaled() -> Tensor:
    return Scaled(torch.ones(4, 4, dtype=torch.int8), 0.5)


ODD: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "sparse": (lambda: X.to_sparse(), "a Tensor of layout torch.sparse_coo", "to_dense()"),
    "rows": (lambda: X.to_sparse_csr(), "a Tensor of layout torch.sparse_csr", "to_dense()"),
    "nested": (
        lambda: torch.nested.nested_tensor([X[:3], X], layout=torch.jagged),
        "a nested tensor",
        "to_padded_tensor",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        "a quantized tensor (torch.qint8)",
        "dequantize()",
    ),
    "class": (scaled, "a Scaled, which computes in its own way", "dequantize"),
    "functions": (lambda: X.as_subclass(Halved), "a Halved, which computes", "dequantize"),
}


@pytest.fixture(scope="module")
def module() -> Any:
    return parallel(Model())


@pytest.mark.parametrize("kind", ODD)
def test_inputs_of_a_step_or_a_call(module: Any, kind: str) -> None:
    made, got, remedy = ODD[kind]
    for act in (module.step, module, lambda x: parallel(Model(), x)):
        with pytest.raises(ap.InvalidInput, match="on plain dense tensors") as caught:
            act(made())
        assert str(caught.value.got).startswith(f"rows, {got}")
        assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize("kind", ["quantized", "class"])
def test_parameters_and_buffers(kind: str) -> None:
    made, got, _ = ODD[kind]
    for name in ("weight", "table"):
        model = Model()
        if name == "weight" and kind == "class":
            model.linear.weight = nn.Parameter(made(), requires_grad=False)
        else:
            del model.linear._parameters["weight"]
            model.linear.register_buffer(name, made())
        with pytest.raises(ap.InvalidInput, match="on plain dense tensors") as caught:
            parallel(model)
        assert str(caught.value.got).startswith(f"linear.{name}, {got}")


def test_packed_weights() -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    packed = quantize(Model(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ap.InvalidInput, match="weights are packed") as caught:
        parallel(packed)
    assert "linear._packed_params" in str(caught.value.got)


def test_a_class_that_computes_as_torch_does_is_a_tensor(module: Any) -> None:
    torch.testing.assert_close(module.step(X.as_subclass(Renamed)), module.step(X))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64])
def test_inputs_of_another_dtype_than_the_layers(module: Any, dtype: torch.dtype) -> None:
    other = X.to(dtype)
    for act in (module.step, lambda x: parallel(Model(), x)):
        with pytest.raises(ap.InvalidInput, match="in the dtype that it computes in") as caught:
            act(other)
        assert f"linear of {dtype}, torch.float32" in str(caught.value.got)
        assert "self.linear(rows)" in str(caught.value.source)
        assert "x.float()" in str(caught.value.remedy)


NORMS = {
    "layer": lambda: nn.LayerNorm(4),
    "batch": lambda: nn.BatchNorm1d(4),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_a_norm_alone_is_given_what_torch_takes(make: Callable[[], nn.Module]) -> None:
    """In the dtype of its parameters, or in halves beside float32: nothing else runs."""
    with pytest.raises(RuntimeError, match="mixed dtype"):
        make()(X.double())
    with pytest.raises(ap.InvalidInput, match="in the dtype that it computes in") as caught:
        parallel(make(), X.double())
    assert "norm of torch.float64, torch.float32" in str(caught.value.got)
    norm = make()
    torch.testing.assert_close(parallel(norm, X.bfloat16())(X.bfloat16()), norm(X.bfloat16()))


def test_whole_numbers_as_a_weight() -> None:
    model = Model()
    model.linear.weight = nn.Parameter(torch.ones(4, 4).to(torch.int8), requires_grad=False)
    with pytest.raises(ap.InvalidInput, match="in the dtype that it computes in") as caught:
        parallel(model)
    assert "linear of torch.float32, torch.int8" in str(caught.value.got)


class Positions(nn.Module):
    """An outer product of whole numbers and others, which torch multiplies element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, rows: Tensor) -> Tensor:
        angles = torch.einsum("i, j -> i j", torch.arange(len(rows)), self.scales)
        return (self.linear(rows) * angles).square().mean()


def test_whole_numbers_in_a_product_that_sums_nothing() -> None:
    assert ap.verify(Positions(), (X,), mesh=ap.Mesh(dp=2)).ok


def test_a_number_that_changes_is_an_input_of_one_program() -> None:
    module = parallel(Model(), X, 0.0)
    for step in range(1, 8):
        module.step(X, float(step))
    assert len(module.programs) == 2
