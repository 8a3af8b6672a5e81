"""Models for the command line, built on the meta device: they have shapes and no data.

    autopar plan autopar.examples:gpt --cluster dgx-h100 --mesh dp=2,tp=4

Each function returns (model, args, kwargs): what `autopar.plan` takes. `--out plan.json` keeps the
plan; `autopar explain plan.json layers.0.up --model autopar.examples:gpt` gives its reasons.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """A block of causal attention and an MLP, each with its residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model of embeddings, blocks and a head, which returns its loss."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.layers = nn.ModuleList(TransformerBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(batch: int, **sizes: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a GPT in bfloat16 with one global batch, all of it on the meta device.

    `sizes` are the arguments of `GPT`.
    """
    sequence = sizes["sequence"]
    with torch.device("meta"):
        model = GPT(**sizes).to(torch.bfloat16)
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        labels = torch.zeros(batch, sequence, dtype=torch.long)
    return model, (ids,), {"labels": labels}


def gpt() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a GPT of 124 million parameters."""
    return build(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=50304, batch=32)


def gpt_xl() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a GPT of 1.5 billion parameters."""
    return build(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50304, batch=32)


def gpt_175b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a GPT of 175 billion parameters, which is planned on a laptop."""
    return build(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200, batch=64)
