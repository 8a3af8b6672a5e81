"""Laws of calls of many lengths on one program, for both backends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar as ap
from tests.dynamic import counted
from tests.outputs import assert_close, gradients

WIDTH = 8


class Block(nn.Module):
    """Attends over what came before, and over the keys and values of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        places = torch.arange(k.shape[2])
        seen = places[-q.shape[2] :, None] >= places
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + self.out(mixed.transpose(1, 2).flatten(2)), (k, v)


class Decoder(nn.Module):
    """Gives logits and a cache of its own, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(13, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor, cache: Any = None, labels: Tensor | None = None) -> Any:
        start = 0 if cache is None else cache[0][0].shape[2]
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        held = []
        for at, block in enumerate(self.blocks):
            x, kv = block(x, None if cache is None else cache[at])
            held.append(kv)
        logits = self.head(x)
        if labels is None:
            return logits, held
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder().double()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % 13


@torch.no_grad()
def greedy(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """Tokens of a loop with one's own cache."""
    logits, cache = model(ids)
    tokens = [logits[:, -1].argmax(-1)]
    for _ in range(count - 1):
        logits, cache = model(tokens[-1][:, None], cache)
        tokens.append(logits[:, -1].argmax(-1))
    return torch.stack(tokens, 1)


def trains_at_every_length(
    lengths: Sequence[int] = (6, 7, 9, 12, 3, 8, 12), **options: Any
) -> ap.ParallelModule:
    """Losses and gradients are the model's; the fourth length and all later need no capture."""
    model = decoder()
    first = ids_of(4, 5)
    module = ap.parallelize(copy.deepcopy(model), (first,), {"labels": first}, **options)
    for at, length in enumerate(lengths):
        ids = ids_of(4, length)
        for each in (model, module):
            each.zero_grad()
        loss = model(ids, labels=ids)
        loss.backward()
        with counted() as count:
            assert_close(module.step(ids, labels=ids), loss.detach())
        assert_close(module.full_grads(), gradients(model))
        assert count["captures"] == (at < 2)
    assert len(module.programs) == 3
    return module


def generates_token_by_token(
    make: Callable[[], nn.Module] = decoder,
    generate: Callable[[nn.Module, Tensor, int], Tensor] = greedy,
    example: dict[str, Any] | None = None,
    **options: Any,
) -> ap.ParallelModule:
    """Tokens are the model's; after the first calls nothing is captured."""
    model = make().eval()
    ids = ids_of(2, 4) + 1
    named = {"ids": ids, "labels": ids} if example is None else example
    module = ap.parallelize(copy.deepcopy(model), (), named, **options).eval()
    for length in (4, 5, 6):
        ids = ids_of(2, length) % 12 + 1
        assert torch.equal(generate(module, ids, 6), generate(model, ids, 6))
    for length in (7, 9):
        ids = ids_of(2, length) % 12 + 1
        with counted() as count:
            assert torch.equal(generate(module, ids, 8), generate(model, ids, 8))
        assert count == {"searches": 0, "captures": 0}
    return module


class Branching(nn.Module):
    """Goes another way, or sees less, where a sequence is long."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length, y = x.shape[1], self.up(x)
        if self.kind == "branch" and length > 6:
            y = y.tanh()
        if self.kind == "slice":
            y = y[:, :6] * 2
        if self.kind == "parts":
            y = y[:, : 1 + length // 6]
        if self.kind == "square":
            y = y * (length * length)
        if self.kind == "window":
            places = torch.arange(length)
            far = places[:, None] - places
            mask = (far >= 0) & (far < 6)
            y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], mask)
        if self.kind == "count":
            y = y.sum((0, 1)) / length
        return y.square().mean()


KINDS = ("branch", "slice", "parts", "square", "window", "count")


def keeps_to_its_branch(kind: str, **options: Any) -> None:
    """A program of short inputs does not run long ones that go another way."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branching(kind).double()
    module: Any = None
    for length in (3, 4, 5, 2, 9, 12, 6, 7, 13, 8, 4):
        x = torch.arange(2.0 * length * 4, dtype=torch.float64).view(2, length, 4).sin()
        if module is None:
            module = ap.parallelize(copy.deepcopy(model), (x,), **options)
        for each in (model, module):
            each.zero_grad()
        loss = model(x)
        loss.backward()
        assert_close(module.step(x), loss.detach())
        assert_close(module.full_grads(), gradients(model))


def llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=13, max_position_embeddings=32, **sizes, **heads)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 13}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).double()


@torch.no_grad()
def generated(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """Tokens of the model's own `generate`."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, max_new_tokens=count, **options)


def generates_as_transformers(name: str, **options: Any) -> ap.ParallelModule:
    """Tokens of a model of transformers are those of its plain one."""
    build = {"llama": llama, "gpt2": gpt2}[name]
    ids = ids_of(2, 4) + 1
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    return generates_token_by_token(build, generated, example, **options)
