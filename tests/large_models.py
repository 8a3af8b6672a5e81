"""Models of real sizes on the meta device: nothing is allocated, they are only planned.

>>> case = resnet50(batch=256)
>>> case.model.head.weight.shape, case.args[0].device.type
(torch.Size([1000, 2048]), 'meta')
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case, _transformers


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """Stages of 3, 4, 6 and 3 bottlenecks; the loss is a cross-entropy over the classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if index == 0 and width > 64 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.average = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(images))))
        x = torch.flatten(self.average(self.blocks(x)), 1)
        return F.cross_entropy(self.head(x), target)


class Classifier(nn.Module):
    """A few layers, then one logit for each of very many classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features), nn.ReLU()
        )
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), target)


class FeedForward(nn.Module):
    """Pairs of linear layers, wide between."""

    def __init__(self, width: int, pairs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(pairs):
            layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), target)


def resnet50(*, batch: int = 256, size: int = 224, classes: int = 1000) -> Case:
    """The standard network for images."""
    images, target = meta(batch, 3, size, size), meta(batch, dtype=torch.long)
    return _case("resnet50", lambda: ResNet50(classes), images, target)


def classifier(*, batch: int = 256, features: int = 2048, classes: int = 131072) -> Case:
    """A classifier over more classes than features."""
    inputs, target = meta(batch, features), meta(batch, dtype=torch.long)
    return _case("classifier", lambda: Classifier(features, classes), inputs, target)


def feed_forward(*, batch: int, width: int, pairs: int = 2) -> Case:
    """Linear layers with a mean squared error."""
    x = meta(batch, width)
    return _case("feed-forward", lambda: FeedForward(width, pairs), x, x)


def gpt2_xl(*, batch: int = 64, sequence: int = 1024, layers: int = 48) -> Case:
    """GPT-2 with 1.5 billion parameters."""
    return gpt2("gpt2-xl", batch, sequence, layers, hidden=1600, heads=25)


def gpt3(*, batch: int = 256, sequence: int = 2048, layers: int = 96) -> Case:
    """GPT-3 with 175 billion parameters."""
    return gpt2("gpt3", batch, sequence, layers, hidden=12288, heads=96)


def gpt_1t(*, batch: int = 3072, sequence: int = 2048, layers: int = 128) -> Case:
    """A GPT with 1,008 billion parameters."""
    return gpt2("gpt-1t", batch, sequence, layers, hidden=25600, heads=160)


def llama3(*, batch: int = 64, sequence: int = 4096, layers: int = 32) -> Case:
    """Llama 3 with 8 billion parameters."""
    return llama("llama3", batch, sequence, layers, hidden=4096, inner=14336, heads=32)


def llama3_70b(*, batch: int = 64, sequence: int = 131072, layers: int = 80) -> Case:
    """Llama 3.1 with 70 billion parameters, by default at all the length that it has."""
    return llama("llama3-70b", batch, sequence, layers, hidden=8192, inner=28672, heads=64)


def mixtral(*, batch: int = 1024, sequence: int = 4096, layers: int = 56) -> Case:
    """Mixtral 8x22B: of eight experts each token goes to two."""
    transformers = _transformers()
    config = transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=layers,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=65536,
        use_cache=False,
    )
    return language("mixtral", lambda: transformers.MixtralForCausalLM(config), batch, sequence)


class Block(nn.Module):
    """Of a decoder with rotary positions, grouped keys and values, and a gated feed-forward."""

    def __init__(self, hidden: int, inner: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        rows = self.width * key_heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.out, self.gate, self.up, self.down = (
            nn.Linear(i, o, bias=False)
            for i, o in [
                *((hidden, hidden), (hidden, rows), (hidden, rows), (hidden, hidden)),
                *((hidden, inner), (hidden, inner), (inner, hidden)),
            ]
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = (turned(part, cos, sin) for part in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Decoder(nn.Module):
    def __init__(self, layers: int, vocabulary: int, hidden: int, *sizes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, *sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def long_llama(*, sequence: int, batch: int = 1, layers: int = 32) -> Case:
    """The shape of Llama 3 with 8 billion parameters, for any length."""
    with torch.device("meta"):
        model = Decoder(layers, 128256, 4096, 14336, 32, 8).to(torch.bfloat16).train()
    ids = meta(batch, sequence, dtype=torch.long)
    turns = (meta(sequence, 128, dtype=torch.bfloat16) for _ in range(2))
    return Case("long-llama", model, (ids, ids, *turns))


def gpt2(name: str, batch: int, sequence: int, layers: int, *, hidden: int, heads: int) -> Case:
    """Return a GPT-2 of any size, computing in bfloat16."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=sequence,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return language(name, lambda: transformers.GPT2LMHeadModel(config), batch, sequence)


def llama(
    name: str,
    batch: int,
    sequence: int,
    layers: int,
    *,
    hidden: int,
    inner: int,
    heads: int,
    key_heads: int = 8,
) -> Case:
    """Return a Llama of any size, computing in bfloat16."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max(8192, sequence),
        use_cache=False,
    )
    return language(name, lambda: transformers.LlamaForCausalLM(config), batch, sequence)


def language(name: str, make: Callable[[], nn.Module], batch: int, sequence: int) -> Case:
    """Return a causal language model of transformers on the meta device, with a batch of ids."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16).train()
    ids = meta(batch, sequence, dtype=torch.long)
    return Case(name, model, (), {"input_ids": ids, "labels": ids})


def _case(name: str, make: Callable[[], nn.Module], *args: Tensor) -> Case:
    with torch.device("meta"):
        return Case(name, make().train(), args)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")
