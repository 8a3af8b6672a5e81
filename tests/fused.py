"""Models of weights of several in one, and the machines on which cutting them is worth it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.captures import alike
from tests.models import Case
from tests.toy import machines


class Transposed(nn.Module):
    """A linear whose weight lies the other way, as GPT-2's."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside) / inside**0.5)
        self.bias = nn.Parameter(torch.randn(outside))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Block(nn.Module):
    """Attention and a gated layer, the weights that read one thing in one, or each by itself."""

    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.heads, self.is_fused, wide = heads, kind != "apart", 2 * width
        if self.is_fused:
            linear = Transposed if kind == "transposed" else nn.Linear
            self.c_attn = linear(width, 3 * width)
            self.gate_up = nn.Linear(width, 2 * wide, bias=False)
        else:
            self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.out, self.down = nn.Linear(width, width), nn.Linear(wide, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norms[0](x)
        read = self.c_attn(inside).split(x.shape[-1], -1) if self.is_fused else [
            linear(inside) for linear in self.qkv
        ]  # fmt: skip
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in read)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        inside = self.norms[1](x)
        both = self.gate_up(inside).chunk(2, -1) if self.is_fused else (
            self.gate(inside), self.up(inside)
        )  # fmt: skip
        return x + self.down(F.silu(both[0]) * both[1])


class Net(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, kind: str = "fused") -> None:
        super().__init__()
        self.block = Block(width, heads, kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


@cache
def small(kind: str, batch: int = 1) -> Case:
    torch.manual_seed(0)
    model = alike(Net(kind=kind).double(), ("fused", kind))
    return Case(kind, model, (torch.randn(batch, 8, 64, dtype=torch.float64),))


def options(mesh: ap.Mesh) -> dict[str, Any]:
    return {"mode": "auto", "mesh": mesh, "cluster": machines(mesh.size), "microbatches": 1}
