"""Random draws have a price: their bits take passes over elements that no kernel hides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.cluster import Node

KINDS = ("plain", "dropout", "attention")


class Some(nn.Module):
    """One operator on weights of this size, and a copy."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.x = kind, nn.Parameter(torch.empty(8, 4, 256, 64, dtype=dtype))

    def forward(self, y: Tensor) -> Tensor:
        if self.kind == "dropout":
            return (F.dropout(self.x, 0.1) * y).sum()
        if self.kind == "copy":
            return (self.x.neg() * y).sum()
        p = 0.1 if self.kind == "attention" else 0.0
        return (F.scaled_dot_product_attention(self.x, self.x, self.x, dropout_p=p) * y).sum()


def compute(kind: str, cluster: ap.Cluster, dtype: torch.dtype = torch.float32) -> float:
    with torch.device("meta"):
        model, y = Some(kind, dtype), torch.empty(8, 4, 256, 64, dtype=dtype)
    return ap.plan(model, (y,), mesh=ap.Mesh(one=1), mode="data", cluster=cluster).cost.compute


def quick() -> ap.Cluster:
    """An accelerator that starts operators at once."""
    cluster = ap.Cluster.preset("dgx-h100")
    device = replace(cluster.device, overhead=0.0, half_bytes=0.0, half_flops=0.0)
    return replace(cluster, nodes=(replace(cluster.nodes[0], device=device),))


def host() -> ap.Cluster:
    """Return cores whose caches hold intermediate results."""
    cluster = quick()
    device = replace(cluster.device, host=replace(cluster.device.host, is_device=True))
    return replace(cluster, nodes=(Node(device, 8, cluster.nodes[0].link),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_costs_the_passes_that_draw(dtype: torch.dtype) -> None:
    on_host, on_device = (
        {kind: compute(kind, cluster, dtype) for kind in (*KINDS, "copy")}
        for cluster in (host(), quick())
    )
    for found in (on_host, on_device):
        assert found["attention"] > 1.3 * found["plain"]
        assert 2 * found["copy"] < found["dropout"] < 20 * found["copy"]
    assert on_host["plain"] > on_device["plain"]  # whose kernel has units for exponentials
