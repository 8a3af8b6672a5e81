"""Tensor parallelism in one to three dims by layouts alone moves what the literature says it does.

x of 48 x 48 goes through 48 -> 96 -> 48; weights are read here as (out, in). All axes of a mesh
differ in size, so that no layout is mistaken for one with its axes exchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar import Layout, Mesh
from tests.models import Case
from tests.parity import assert_parity

Dims = tuple[Any, Any]


class Product(NamedTuple):
    """The layouts of one product: stored and used, of its input and of its weight."""

    x: Dims
    used_x: Dims
    weight: Dims
    used_weight: Dims


class Way(NamedTuple):
    mesh: Mesh
    up: Product
    down: Product
    out: Dims
    weights: str  # the local shapes of 1024 x 256 and 256 x 1024 where each axis has size 2
    moved: list[str]  # with the bytes that a rank has, of what is larger


class Perceptron(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(48, 96, bias=False), nn.Linear(96, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.product(x, self.up.weight, self.way.up))
        return ap.shard(self.product(h, self.down.weight, self.way.down), self.way.out).sum()

    def product(self, x: Tensor, weight: Tensor, how: Product) -> Tensor:
        x = ap.shard(ap.shard(x, how.x), how.used_x)
        return F.linear(x, ap.shard(weight, how.used_weight))


DA, IJ, IK, JI, KI = ("d", "a"), ("i", "j"), ("i", "k"), ("j", "i"), ("k", "i")
WAYS = {
    "1-D": Way(
        Mesh(a=2),
        Product((None, None), (None, None), ("a", None), ("a", None)),
        Product((None, "a"), (None, "a"), (None, "a"), (None, "a")),
        (None, None),
        "512x256 256x512",
        ["all_reduce over a: 18432, back: identity"],
    ),
    "2-D": Way(
        Mesh(a=2, b=3),
        Product(("a", "b"), ("a", None), ("b", "a"), ("b", None)),
        Product(("a", "b"), ("a", None), ("b", "a"), ("b", None)),
        ("a", "b"),
        "512x128 128x512",
        [
            "all_gather over b: 9216, back: None",  # 48/2 x 48: x learns nothing
            "all_gather over a: 12288, back: reduce_scatter",  # 96/3 x 48
            "all_gather over b: 18432, back: reduce_scatter",  # 48/2 x 96
            "all_gather over a: 12288, back: reduce_scatter",  # 48/3 x 96
            "all_reduce over a,b: 8, back: identity",  # the loss
        ],
    ),
    "2.5-D": Way(
        Mesh(d=4, a=2, b=3),
        Product((DA, "b"), (DA, None), ("b", "a"), ("b", None)),
        Product((DA, "b"), (DA, None), ("b", "a"), ("b", None)),
        (DA, "b"),
        "512x128 128x512",
        [
            "all_gather over b: 2304, back: None",  # 48/8 x 48
            "all_gather over a: 12288, back: reduce_scatter",  # 96/3 x 48
            "all_gather over b: 4608, back: reduce_scatter",  # 48/8 x 96
            "all_gather over a: 12288, back: reduce_scatter",  # 48/3 x 96
            "all_reduce over d,a,b: 8, back: identity",
        ],
    ),
    "3-D": Way(
        Mesh(i=2, j=3, k=4),
        Product((IJ, "k"), ("i", "k"), (JI, "k"), ("j", "k")),
        Product((IK, "j"), ("i", "j"), (KI, "j"), ("k", "j")),
        (IJ, "k"),
        "256x128 64x512",
        [
            "all_gather over j: 2304, back: None",  # 48/2 x 48/4
            "all_gather over i: 3072, back: reduce_scatter",  # 96/3 x 48/4
            "reduce_scatter over k: 6144, back: all_gather",  # 48/2 x 96/3
            "all_gather over k: 6144, back: reduce_scatter",  # 48/2 x 96/3
            "all_gather over i: 3072, back: reduce_scatter",  # 48/4 x 96/3
            "reduce_scatter over j: 2304, back: all_gather",  # 48/2 x 48/4
            "all_reduce over i,j,k: 8, back: identity",
        ],
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_local_shapes_movements_bytes_and_parity(way: Way) -> None:
    torch.manual_seed(0)
    model = Perceptron(way).double()
    ap.shard(model.up, params={"weight": way.up.weight})
    ap.shard(model.down, params={"weight": way.down.weight})
    module = assert_parity(Case("perceptron", model, (torch.randn(48, 48).double(),)), way.mesh)
    moved = module.plan.movements()
    assert [f"{m.forward} over {m.axis}: {m.bytes}, back: {m.backward}" for m in moved] == way.moved


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_local_shapes_are_those_of_the_literature(way: Way) -> None:
    mesh = Mesh(**dict.fromkeys(way.mesh.names, 2))
    sizes = (1024, 256), (256, 1024)
    shapes = [
        Layout(*product.weight).local_shape(size, mesh, 0)
        for product, size in zip((way.up, way.down), sizes)
    ]
    assert " ".join("x".join(map(str, shape)) for shape in shapes) == way.weights
