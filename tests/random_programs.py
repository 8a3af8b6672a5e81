"""Random programs: small models of everything that people put into one, made from a number.

>>> case = program(7)
>>> case.model(*case.args)

Every activation is (batch, sequence, hidden) in float64. A block is a residual of some operators
that a training script might have: projections that are cut into parts, sorts, buffers, constants,
writes in place, parts in bfloat16, weights that pass through operators or are made of several
parameters, parameters that are frozen, tied, unused, or read where no gradient flows, figures and
parts of the loss that are kept in attributes. Losses are means and sums, with constants,
regularisers and auxiliary terms.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.combined import COMBINATIONS, Combined
from tests.models import IGNORED, Case

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 12, 3, 6, 11
SMOOTH = (torch.tanh, F.gelu, F.silu, torch.sigmoid, F.softplus, F.elu)
ACTIVATIONS = (torch.relu, *SMOOTH)


class Feed(nn.Module):
    """A feed-forward layer behind some norm."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice([HIDDEN, 2 * HIDDEN, 7])
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN, rng.random() < 0.5)
        self.norm: nn.Module = nn.LayerNorm(HIDDEN) if rng.random() < 0.6 else nn.Identity()
        self.act = rng.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Attend(nn.Module):
    """Attention with a fused projection that is taken apart in one of many ways."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.way, self.mask = rng.randrange(4), rng.randrange(4)
        self.scale = rng.choice([None, 0.5])
        self.register_buffer("keep", torch.rand(SEQUENCE, SEQUENCE) < 0.7)
        self.keep |= torch.eye(SEQUENCE, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.qkv(x)
        if self.way == 0:
            q, k, v = joined.chunk(3, -1)
        elif self.way == 1:
            q, k, v = joined.split(HIDDEN, dim=-1)
        elif self.way == 2:
            q, k, v = joined.unflatten(-1, (3, HIDDEN)).unbind(-2)
        else:
            q, k, v = (joined[..., i * HIDDEN : (i + 1) * HIDDEN] for i in range(3))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        if self.mask == 3:
            scores = q @ k.transpose(-1, -2) / 2
            attended = scores.masked_fill(~self.keep, -1e9).softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self.keep if self.mask == 2 else None,
                is_causal=self.mask == 1,
                scale=self.scale,
            )
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """Two results of one projection, one of them a gate."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.both, self.by_glu = nn.Linear(HIDDEN, 2 * HIDDEN), rng.random() < 0.05

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        if self.by_glu:
            return x + F.glu(both)
        value, gate = both.tensor_split(2, dim=-1)
        return x + value * gate.sigmoid()


class Several(nn.Module):
    """Operators with several results, of which one, another or all are used."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(HIDDEN, HIDDEN), rng.randrange(7)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.way == 0:
            values, indices = y.topk(4, dim=-1)
            return x + values.sum(-1, keepdim=True) + y.gather(-1, indices).mean(-1, keepdim=True)
        if self.way == 1:
            return x + y.sort(dim=-1, descending=True)[0] * self.scale
        if self.way == 2:
            variance, mean = torch.var_mean(y, -1, keepdim=True)
            return x + (y - mean) * (variance + 1e-3).rsqrt() * self.scale
        if self.way == 3:
            # Equal tokens would share the largest value, and rounding choose its place.
            ramp = 1e-3 * torch.arange(SEQUENCE, dtype=y.dtype)[:, None]
            largest, at = (y + ramp).max(dim=1, keepdim=True)
            return x + largest + at * 1e-2
        if self.way == 4:
            low, high = torch.aminmax(y, dim=-1, keepdim=True)
            return x + (y - low) / (high - low + 1.0)
        if self.way == 5:
            out, mean, rstd = torch.native_layer_norm(y, [HIDDEN], self.scale, None, 1e-5)
            return x + out + mean * 0.1 + rstd * 0.01
        return x + torch.stack(y.cummax(dim=1)[:1]).sum(0)


class Convolve(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        groups = rng.choice([1, 1, 3])
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Experts(nn.Module):
    """A soft mixture of experts by einsum."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        count = rng.choice([2, 4])
        self.router = nn.Linear(HIDDEN, count)
        self.weight = nn.Parameter(0.2 * torch.randn(count, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return x + torch.einsum("bsh,ehf,bse->bsf", x, self.weight, shares)


class Shuffle(nn.Module):
    """Moves and joins parts along the sequence and the hidden dim, between two projections."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(HIDDEN, HIDDEN), rng.randrange(7)
        self.order = torch.randperm(SEQUENCE)  # a constant

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.way == 0:
            return x + y.cumsum(1) / SEQUENCE
        if self.way == 1:
            return x + y.roll(1, 1) + y.flip(-1)
        if self.way == 2:
            return x + F.pad(y, (0, 0, 1, 0))[:, :-1]
        if self.way == 3:
            return x + torch.cat([y[..., 5:], y[..., :5]], -1)
        if self.way == 4:
            return x + y[:, self.order]
        if self.way == 5:
            return x + y.transpose(-1, 1).transpose(1, 1).transpose(-1, 1)
        return x + y.mean(1, keepdim=True).expand_as(x).repeat_interleave(1, 1)


class InPlace(nn.Module):
    """Writes into values and parts of them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(HIDDEN, HIDDEN), rng.randrange(5)
        self.first = nn.Parameter(0.1 * torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.way == 0:
            y[:, 0] += self.first
        elif self.way == 1:
            y.mul_(0.5).add_(self.first)
        elif self.way == 2:
            y = F.relu(y, inplace=True) + self.first
        elif self.way == 3:
            part = y[..., :4]
            part.zero_()
            y = y + self.first
        else:
            y.clamp_(-1.0, 1.0)
            y = torch.where(y > 0, y, y * self.first)
        return x + y


class Weights(nn.Module):
    """Weights that pass through operators of their own, or that several calls read."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(0.3 * torch.randn(HIDDEN, HIDDEN)), rng.randrange(4)
        self.gain = nn.Parameter(torch.ones(HIDDEN, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == 0:
            return x + x @ torch.where(self.weight > 0, self.weight, 0.1 * self.weight)
        if self.way == 1:
            return x + F.linear(x, self.gain * F.normalize(self.weight, dim=1))
        if self.way == 2:
            return x + F.linear(torch.tanh(x @ self.weight), self.weight)
        return x + x @ self.weight.transpose(0, 1).transpose(0, 0) * self.gain.mean()


class Odd(nn.Module):
    """Parameters that do not learn, each in its way, beside one that does."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.frozen = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
        self.unused, self.detached = (nn.Parameter(torch.rand(HIDDEN)) for _ in range(2))
        self.compared, self.zeroed = (nn.Parameter(torch.rand(HIDDEN)) for _ in range(2))
        self.way = rng.randrange(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.frozen + self.detached.detach()
        if self.way == 0:
            y = y * (self.compared > 0.5)
        elif self.way == 1:
            y = y + 0 * self.zeroed
        else:
            with torch.no_grad():
                y = y + self.compared.argmax()
        return x + y


class Buffers(nn.Module):
    """Buffers that are read, counted and averaged, without a look at the batch."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(HIDDEN, HIDDEN), rng.randrange(3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(HIDDEN), persistent=rng.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == 0:
            self.steps += 1
        elif self.way == 1:
            self.mean.mul_(0.9).add_(0.1 * self.inner.bias.detach())
        return x + self.inner(x) + self.mean + (self.steps * 1e-2 if self.way == 2 else 0.0)


class BatchStatistics(nn.Module):
    """Batch norm: a micro-batch has statistics of its own."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


class Coarse(nn.Module):
    """A part in bfloat16, by hand or by autocast."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.by_hand = nn.Linear(HIDDEN, HIDDEN), rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            weight, bias = self.inner.weight.bfloat16(), self.inner.bias.bfloat16()
            return x + F.linear(x.bfloat16(), weight, bias).to(x.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), self.inner.weight.float(), self.inner.bias.float())
        return x + y.to(x.dtype)


class Together(Combined):
    """A weight that is made of two parameters, to which backward may hand one tensor."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng.choice([*COMBINATIONS]), HIDDEN)


class Aside(nn.Module):
    """A layer that keeps a part of the loss, or a figure, in an attribute."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.is_part = nn.Linear(HIDDEN, HIDDEN), rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.aux = y.square().mean() if self.is_part else y.detach().abs().mean()
        return x + y


COMMON = (
    *(Feed, Attend, Gate, Several, Convolve, Experts, Shuffle, InPlace, Weights, Odd, Buffers),
    *(Together, Aside),
)
RARE = (BatchStatistics, Coarse)


class Net(nn.Module):
    """A stem, some blocks, a head and a loss."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.by_ids = rng.random() < 0.5
        self.stem: nn.Module = (
            nn.Embedding(VOCABULARY, HIDDEN) if self.by_ids else nn.Linear(HIDDEN, HIDDEN)
        )
        kinds = [
            rng.choice(RARE if rng.random() < 0.08 else COMMON)
            for _ in range(rng.choice([4, 6, 8]))
        ]
        in_turns = BatchStatistics in kinds  # what a micro-batch gives is then a mean of its own
        kinds = [Feed if in_turns and kind in (Buffers, Aside) else kind for kind in kinds]
        if Coarse in kinds:  # a kink or an order would make any rounding large
            kinds = [Gate if kind in (Several, InPlace) else kind for kind in kinds]
        self.blocks = nn.ModuleList(kind(rng) for kind in kinds)
        for block in self.blocks:
            if Coarse in kinds and isinstance(block, Feed):
                block.act = rng.choice(SMOOTH)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if self.by_ids and rng.random() < 0.4:
            self.head.weight = self.stem.weight
        if rng.random() < 0.2:  # a block that runs twice
            self.blocks.append(self.blocks[0])
        frozen = rng.random() < 0.2
        self.stem.requires_grad_(not frozen)
        self.kind = rng.choice([2, 3, 4]) if in_turns else rng.randrange(5)
        self.extra, self.form = rng.randrange(7), rng.randrange(3)

    def forward(self, x: Tensor, target: Tensor) -> object:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = self._extra(self._loss(logits, target))
        if self.form == 0:
            return loss
        return (loss, logits) if self.form == 1 else {"loss": loss, "hidden": hidden}

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        flat, labels = logits.flatten(0, 1), target.flatten()
        if self.kind == 0:
            return F.cross_entropy(flat, labels, ignore_index=IGNORED)
        if self.kind == 1:
            return F.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum") / 50
        if self.kind == 2:
            return logits.square().mean()
        if self.kind == 3:
            return F.smooth_l1_loss(logits, torch.ones_like(logits))
        return -(flat.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])).mean()

    def _extra(self, loss: Tensor) -> Tensor:
        if self.extra == 0:
            return loss + 1.0
        if self.extra == 1:
            return (loss * 2 + 1) / 2
        if self.extra == 2:
            return loss + 1e-2 * self.head.weight.square().sum()
        if self.extra == 3:
            return loss + 1e-2 * sum(p.square().mean() for p in self.parameters())
        if self.extra == 4:
            return loss + 1e-2 * sum(p.square().sum() for p in self.parameters())
        parts = (one.aux for one in self.blocks if isinstance(one, Aside) and one.is_part)
        return sum((0.1 * part for part in parts), loss)


def program(seed: int) -> Case:
    """The program of a number, with a batch of 8, 9 or 12."""
    rng = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net(rng).double().train()
        args = _batch(model, rng.choice([8, 8, 9, 12]))
    return Case(f"random-{seed}", model, args)


def another_batch(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """A batch like that of a random program."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _batch(case.model, len(case.args[0]))


def _batch(model: nn.Module, size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE))
    labels = torch.randint(0, VOCABULARY, (size, SEQUENCE))
    labels[torch.rand(labels.shape) < 0.2] = IGNORED
    real = torch.randn(size, SEQUENCE, HIDDEN, dtype=torch.float64)
    return (ids if model.by_ids else real), labels


def has(model: nn.Module, kind: Callable[..., nn.Module]) -> bool:
    """Whether a block of this kind is in the model."""
    return any(type(module) is kind for module in model.modules())
