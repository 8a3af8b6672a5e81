"""What no flat graph of dense tensors can hold is refused by its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import Function

X = torch.randn(4, 3, 4)
GENERATOR = torch.Generator()


class Traced(nn.Module):
    def __init__(self, scripted: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = scripted(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def test_a_packed_sequence() -> None:
    def packed(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return pack_padded_sequence(x, lengths, batch_first=True).data.sum()

    with pytest.raises(InvalidInput, match="a packed sequence") as refused:
        capture(Function(packed), (X, torch.tensor([3, 3, 2, 1])))
    assert "return pack_padded_sequence" in str(refused.value.source)
    assert pack_padded_sequence(X, torch.tensor([3, 3, 2, 1]), batch_first=True).data.shape == (
        9,
        4,
    )


def test_a_generator() -> None:
    def draws(self: nn.Module, x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=GENERATOR)).sum()

    with pytest.raises(InvalidInput, match="Generator that forward draws from") as refused:
        capture(Function(draws), (X,))
    assert "generator=GENERATOR" in str(refused.value.source)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "scripted",
    [torch.jit.script, lambda module: torch.jit.trace(module, X)],
    ids=["script", "trace"],
)
def test_a_module_of_torchscript(scripted: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(InvalidInput, match="inner, a module of TorchScript"):
        capture(Traced(scripted), (X,))
