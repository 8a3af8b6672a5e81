"""A GPT for the benchmarks: pre-norm blocks, one fused projection, causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One case of a benchmark: a model and its global batch."""

    hidden: int  # 512
    heads: int  # 8
    sequence: int  # 128
    batch: int  # 8
    layers: int = 2
    vocabulary: int = 512
    dropout: float = 0.0  # of what a block adds
    attention_dropout: float = 0.0
    causal: bool = True

    @property
    def name(self) -> str:
        return f"hidden {self.hidden}, {self.batch} x {self.sequence} tokens"


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width, self.causal = sizes.hidden // sizes.heads, sizes.causal
        self.attention_dropout = sizes.attention_dropout
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.down = nn.Linear(4 * sizes.hidden, sizes.hidden)
        self.drop = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def attention(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        # As many heads as there are columns: all of them, or one rank's.
        qkv = self.qkv(x).view(batch, sequence, -1, 3, self.width)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        p = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(x.transpose(1, 2).reshape(batch, sequence, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def gpt(sizes: Sizes) -> GPT:
    """The same model on every rank."""
    torch.manual_seed(0)
    return GPT(sizes)


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The same global batch on every rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.batch, sizes.sequence + 1)
    tokens = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
