"""The models of published training runs, on the meta device, and how their papers cut them.

Annotated, weights are cut in columns and rows over `tp`, as in Megatron-LM, and with
`sequence_parallel` the norms and what lies between them along the sequence; micro-batches over
`dp`. The GPTs have the dropout of their papers, and the kernels that its runs had fused are one
operator here. These models are planned, never run.
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


@torch.library.custom_op("published::joined", mutates_args=())
def joined(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Bias, dropout and residual in one kernel, which writes a mask, too."""
    return residual + F.dropout(x + bias, 0.1)


@joined.register_fake
def _(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("published::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of a Llama in one kernel: its backward makes what lies between again."""
    return F.silu(gate) * up


@gated.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(up)


def _refuse(ctx, grad: Tensor) -> Tensor:
    raise NotImplementedError("models of published runs are planned, not run")


dropped.register_autograd(_refuse)
joined.register_autograd(_refuse)
gated.register_autograd(_refuse)
ap.register_rule("published::dropped", "... -> ...", saved="", extra="bool: ...")
ap.register_rule("published::gated", "..., ... -> ...", saved="0 1")
ap.register_rule("published::joined", "... h, h, ... h -> ... h", saved="", extra="bool: ... h")


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
        self.qkv, self.up = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.bias1, self.bias2 = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        self.core = Core(is_fused=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, -1, 3, self.width)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1)
        x = joined(self.out(mixed), self.bias1, x)
        return joined(self.down(F.gelu(self.up(self.norm2(x)))), self.bias2, x)


class Heads(nn.Module):
    """Queries, keys and values of grouped heads."""

    def __init__(self, hidden: int, narrow: int) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, narrow, bias=False)
        self.v = nn.Linear(hidden, narrow, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


class Gate(nn.Module):
    """The wide half of a gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.gate(x), self.up(x))


class LlamaBlock(nn.Module):
    """Grouped heads and a gated MLP, without biases; rotations are left out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        assert sizes.inner is not None
        assert sizes.groups is not None
        hidden = sizes.hidden
        self.width = hidden // sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = Heads(hidden, sizes.groups * self.width)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = Gate(hidden, sizes.inner)
        self.down = nn.Linear(sizes.inner, hidden, bias=False)
        self.core = Core(is_fused=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        heads = self.qkv(self.norm1(x))
        q, k, v = (one.view(batch, sequence, -1, self.width).transpose(1, 2) for one in heads)
        x = x + self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1))
        return x + self.down(self.up(self.norm2(x)))


class Decoder(nn.Module):
    """Embeddings, blocks, and the loss of each next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = None
        if not sizes.is_llama:
            self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        kind = LlamaBlock if sizes.is_llama else Block
        self.blocks = nn.ModuleList(kind(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden) if sizes.is_llama else nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def annotate(model: Decoder, sequence_parallel: bool) -> None:
    """Cut it as the papers did."""
    rows = ("dp", "tp" if sequence_parallel else None, None)
    for block in model.blocks:
        assert isinstance(block, Block | LlamaBlock)
        ap.shard(block, out_strategy=(rows,))
        for norm in (block.norm1, block.norm2):
            ap.shard(norm, (rows,), (rows,))
        for wide in (block.qkv, block.up):
            for part in wide.modules():
                if isinstance(part, nn.Linear):
                    bias = {} if part.bias is None else {"bias": ("tp",)}
                    ap.shard(part, params={"weight": ("tp", None), **bias})
        for narrow in (block.out, block.down):
            ap.shard(narrow, params={"weight": (None, "tp")})
    ap.shard(model.norm, (rows,), (rows,))
    ap.shard(model.head, (("dp", None, None),), (("dp", None, "tp"),))
    for table in (model.tokens, model.head):
        ap.shard(table, params={"weight": ("tp", None)})
