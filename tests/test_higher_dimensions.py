"""Tensor parallelism in one to three dims, on layouts alone: local shapes as in the literature.

Of x 16 x 256 through 256 -> 1024 -> 256; weights are read here as (out, in).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from tests.models import Case
from tests.parity import assert_parity

Dims = tuple[Any, Any]


class Perceptron(nn.Module):
    def __init__(self, rows: Dims, inner: Dims) -> None:
        super().__init__()
        self.rows, self.inner = rows, inner
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = ap.shard(x, self.rows)
        h = ap.shard(torch.tanh(self.up(x)), self.inner)
        return ap.shard(self.down(h), self.rows).pow(2).mean()


Q = Mesh(a=2, b=2)
DEEP, CUBE = Mesh(d=2, a=2, b=2), Mesh(i=2, j=2, k=2)
DA, IJ, IK, JI, KI = ("d", "a"), ("i", "j"), ("i", "k"), ("j", "i"), ("k", "i")
# The mesh; the layouts of x, of the first weight, of what is between, of the second weight; and the
# local shapes of the weights.
WAYS = {
    "1-D": (Mesh(a=2), (None, None), ("a", None), (None, "a"), (None, "a"), "512x256 256x512"),
    "2-D": (Q, ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"), "512x128 128x512"),
    "2.5-D": (DEEP, (DA, "b"), ("b", "a"), (DA, "b"), ("b", "a"), "512x128 128x512"),
    "3-D": (CUBE, (IJ, "k"), (KI, "j"), (IK, "j"), (JI, "k"), "256x128 64x512"),
}


@pytest.mark.parametrize(
    ("mesh", "rows", "up", "inner", "down", "shapes"), WAYS.values(), ids=WAYS.keys()
)
def test_local_shapes_and_parity(
    mesh: Mesh, rows: Dims, up: Dims, inner: Dims, down: Dims, shapes: str
) -> None:
    torch.manual_seed(0)
    model = Perceptron(rows, inner).double()
    ap.shard(model.up, params={"weight": up})
    ap.shard(model.down, params={"weight": down})
    module = assert_parity(Case("perceptron", model, (torch.randn(16, 256).double(),)), mesh)
    layouts = module.plan.layouts
    found = [
        "x".join(map(str, layouts[f"{name}.weight"].local_shape(shape, mesh, 0)))
        for name, shape in (("up", (1024, 256)), ("down", (256, 1024)))
    ]
    assert " ".join(found) == shapes
