"""The models of published training runs, on the meta device, annotated as their papers cut them.

Weights are cut in columns and rows over `tp`, as in Megatron-LM, and with `sequence_parallel` the
norms and what lies between them along the sequence; micro-batches over `dp`. The GPTs have the
dropout of their papers. These models are planned, never run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap


@torch.library.custom_op("published::causal_softmax", mutates_args=())
def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Scale, causal mask and softmax in one kernel, as the runs with unfused attention had it."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(later, -torch.inf).softmax(-1)


@causal_softmax.register_fake
def _(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx, inputs, output) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _gradient(ctx, grad: Tensor) -> tuple[Tensor, None]:
    (weights,) = ctx.saved_tensors
    made = weights * (grad - (grad * weights).sum(-1, keepdim=True))
    return made * ctx.scale, None


causal_softmax.register_autograd(_gradient, setup_context=_keep)
ap.register_rule("published::causal_softmax", "... q! k! -> ... q! k!", saved="output")


@torch.library.custom_op("published::dropped", mutates_args=())
def dropped(x: Tensor) -> Tensor:
    """Dropout in one kernel: it reads, and writes what is left and a mask."""
    return F.dropout(x, 0.1)


@dropped.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _refuse(ctx, grad: Tensor) -> Tensor:
    raise NotImplementedError("models of published runs are planned, not run")


dropped.register_autograd(_refuse)
ap.register_rule("published::dropped", "... -> ...", saved="", extra="bool: ...")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A decoder of a published run."""

    hidden: int  # 2304
    heads: int  # 24
    layers: int  # 24
    sequence: int = 2048
    vocabulary: int = 51_200
    groups: int | None = None  # heads of keys and values, if fewer: the model is then a Llama
    inner: int | None = None  # of the gated MLP of a Llama

    @property
    def is_llama(self) -> bool:
        return self.inner is not None


class Core(nn.Module):
    """Attention between its linear layers: fused, or with scores and weights in memory."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.is_fused:
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return dropped(causal_softmax(q @ k.transpose(-1, -2), q.shape[-1] ** -0.5)) @ v


class Block(nn.Module):
    """Of a GPT: one projection for queries, keys and values, and an MLP with biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.width = hidden // sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.core = Core(is_fused=False)
        for columns in (self.qkv, self.up):
            ap.shard(columns, params={"weight": ("tp", None), "bias": ("tp",)})
        for rows in (self.out, self.down):
            ap.shard(rows, params={"weight": (None, "tp")})

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, -1, 3, self.width)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1)
        x = x + dropped(self.out(mixed))
        return x + dropped(self.down(F.gelu(self.up(self.norm2(x)))))


class LlamaBlock(nn.Module):
    """Grouped heads and a gated MLP, without biases; rotations are left out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        assert sizes.inner is not None
        assert sizes.groups is not None
        hidden, inner = sizes.hidden, sizes.inner
        self.width = hidden // sizes.heads
        narrow = sizes.groups * self.width
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, narrow, bias=False)
        self.v = nn.Linear(hidden, narrow, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.core = Core(is_fused=True)
        for columns in (self.q, self.k, self.v, self.gate, self.up):
            ap.shard(columns, params={"weight": ("tp", None)})
        for rows in (self.out, self.down):
            ap.shard(rows, params={"weight": (None, "tp")})

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        normed = self.norm1(x)
        q, k, v = (
            part(normed).view(batch, sequence, -1, self.width).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Embeddings, blocks, and the loss of each next token."""

    def __init__(self, sizes: Sizes, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = None
        if not sizes.is_llama:
            self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        kind = LlamaBlock if sizes.is_llama else Block
        self.blocks = nn.ModuleList(kind(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden) if sizes.is_llama else nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        ap.shard(self.tokens, params={"weight": ("tp", None)})
        ap.shard(self.head, params={"weight": ("tp", None)})
        rows = ("dp", "tp" if sequence_parallel else None, None)
        for block in self.blocks:
            ap.shard(block, out_strategy=(rows,))
            for norm in (block.norm1, block.norm2):
                ap.shard(norm, (rows,), (rows,))
        ap.shard(self.norm, (rows,))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
