"""Pieces of rows whose lengths follow from values are rows that choose their matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.capture.listing import operator_name
from autopar.errors import InvalidInput


class Groups(nn.Module):
    """A mixture whose experts take pieces of the sorted rows."""

    def __init__(self, joined: Callable[[Groups, Any], Tensor]) -> None:
        super().__init__()
        self.router, self.joined = nn.Linear(4, 3), joined
        self.up, self.bias = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6))
        self.down = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(2, 1)[1].flatten()
        sizes = F.one_hot(chosen, 3).sum(0).tolist()
        order = chosen.argsort(stable=True)
        rows = self.joined(self, x[order // 2].split(sizes))
        return (torch.zeros_like(x).index_add(0, order // 2, rows) ** 2).sum()


def _alike(self: Groups, pieces: Any) -> Tensor:
    rows = []
    for number, piece in enumerate(pieces):
        inner = 2 * F.gelu(piece @ self.up[number] + self.bias[number])
        rows.append(self.down[number](inner) - piece)
    return torch.cat(rows)


def _by_keywords(self: Groups, pieces: Any) -> Tensor:
    matrices = self.up.mT
    up = (F.linear(p, weight=w, bias=b) for p, w, b in zip(pieces, matrices, self.bias))
    return torch.cat([down(row.tanh()) for row, down in zip(up, self.down)], dim=0)


def example(joined: Callable[[Groups, Any], Tensor]) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Groups(joined).double(), (torch.randn(8, 4, dtype=torch.float64),)


@pytest.mark.parametrize("joined", [_alike, _by_keywords])
@pytest.mark.parametrize("mesh", [ap.Mesh(dp=2, tp=2), ap.Mesh(tp=3)], ids=str)
def test_they_are_those_of_the_model(joined: Any, mesh: ap.Mesh) -> None:
    assert ap.verify(*example(joined), mesh=mesh).ok


def test_a_product_reads_the_stack_itself() -> None:
    names = [operator_name(node.target) for node in capture(*example(_alike)).operators]
    assert names.count("autopar.chosen_products") == 2
    assert names.count("stack") == 2  # of the modules' matrices and biases


def test_lengths_that_inputs_say_are_known() -> None:
    class Lengths(nn.Linear):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            first, second = super().forward(x).split(lengths.tolist())
            return first.sum() - second.square().sum()

    x, lengths = torch.randn(6, 4, dtype=torch.float64), torch.tensor([2, 4])
    assert ap.verify(Lengths(4, 4).double(), (x, lengths), mesh=ap.Mesh(tp=2)).ok
    module = ap.parallelize(
        Lengths(4, 4).double(), (x, lengths), mesh=ap.Mesh(tp=2), backend="virtual"
    )
    with pytest.raises(InvalidInput, match="decided"):
        module.step(x, torch.tensor([3, 3]))


def _some(self: Groups, pieces: Any) -> Tensor:
    return torch.cat([*pieces[1:], pieces[0]])


def _differently(self: Groups, pieces: Any) -> Tensor:
    return torch.cat([piece * (number + 1) for number, piece in enumerate(pieces)])


def _summed(self: Groups, pieces: Any) -> Tensor:
    return torch.cat([piece - piece.mean(0) for piece in pieces])


def _asked(self: Groups, pieces: Any) -> Tensor:
    return torch.cat([piece * len(piece) for piece in pieces])


def _of_shape(self: Groups, pieces: Any) -> Tensor:
    return torch.cat([piece for piece in pieces if piece.shape[0]])


def _changed(self: Groups, pieces: Any) -> Tensor:
    weight = self.up.mT.clone()
    rows = [F.linear(piece, matrix) for piece, matrix in zip(pieces, weight)]
    weight.mul_(2)
    return torch.cat([down(row) for row, down in zip(rows, self.down)])


@pytest.mark.parametrize("joined", [_some, _differently, _summed, _asked, _of_shape, _changed])
def test_what_is_of_no_group_is_refused(joined: Any) -> None:
    with pytest.raises(InvalidInput, match="must not depend on the values") as error:
        capture(*example(joined))
    assert "piece" in str(error.value)
    assert "test_grouped.py" in str(error.value.source)


def test_a_number_of_the_list_is_refused() -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            counts = (super().forward(x) > 0).sum(0).tolist()
            return x.sum() * counts[0]

    with pytest.raises(InvalidInput, match="a number of a list") as error:
        capture(Counted(4, 4), (torch.randn(3, 4),))
    assert "counts[0]" in str(error.value.source)
