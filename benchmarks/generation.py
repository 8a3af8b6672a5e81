"""Generation, new lengths and changing numbers, by autopar and by the plain model, paired.

    python -m benchmarks.generation [--rounds 10] [--layers 4]
    torchrun --nproc-per-node 2 -m benchmarks.generation

A case prints one line of JSON: medians of CPU seconds of a call of each, of their ratios within a
round, and what the first calls took, which capture. Each process computes with one thread.

    generate      10 tokens with the cache of transformers, prompts of one length
    own cache     10 tokens in a loop with a cache of tuples
    new length    a step of a length that no step had, beside one of a length that is known
    number        a step with a Python number that changes each time, beside one that stays
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar as ap
from tests.models import gpt

TOKENS, PROMPT, WARM = 10, 7, 4
Call = Callable[[int], Any]  # of the round


def llama(layers: int) -> nn.Module:
    """Return a small Llama, which generates."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return transformers.LlamaForCausalLM(config).eval()


def parallel(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> ap.ParallelModule:
    """Return a parallel module on all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ap.parallelize(copy.deepcopy(model), (), kwargs, mesh=ap.Mesh(tp=ranks), **options)


def ids_of(length: int, batch: int = 2) -> Tensor:
    """Return tokens of which none pads."""
    return torch.arange(batch * length).view(batch, length) * 7 % 61 + 1


def generate(layers: int) -> dict[str, Call]:
    """Generate tokens by the method of transformers."""
    model = llama(layers)
    module = parallel(model, {"input_ids": ids_of(4), "labels": ids_of(4), "use_cache": False})
    module.eval()
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def by(model: Any) -> Call:
        def call(number: int) -> Tensor:
            with torch.no_grad():
                return model.generate(ids_of(PROMPT), eos_token_id=None, **options)

        return call

    assert torch.equal(by(model)(0), by(module)(0))
    return {"autopar": by(module), "plain": by(model)}


def own_cache(layers: int) -> dict[str, Call]:
    """Generate tokens in a loop with a cache of tuples."""
    model = Decoder(layers).eval()
    ids = ids_of(4)
    module = parallel(model, {"ids": ids, "labels": ids}).eval()

    def by(model: nn.Module) -> Call:
        @torch.no_grad()
        def call(number: int) -> Tensor:
            logits, cache = model(ids_of(PROMPT))
            tokens = [logits[:, -1].argmax(-1)]
            for _ in range(TOKENS - 1):
                logits, cache = model(tokens[-1][:, None], cache)
                tokens.append(logits[:, -1].argmax(-1))
            return torch.stack(tokens)

        return call

    assert torch.equal(by(model)(0), by(module)(0))
    return {"autopar": by(module), "plain": by(model)}


def new_length(layers: int) -> dict[str, Call]:
    """Take steps of lengths that are new, and of one that is known."""
    case = gpt(batch=4, sequence=128, vocabulary=64, hidden=32, heads=2, layers=layers)
    module = parallel(case.model, {"ids": case.args[0], "labels": case.args[1]})

    def of(length: int) -> None:
        module.zero_grad()
        module.step(ids=ids_of(length, 4), labels=ids_of(length, 4))

    return {"new": lambda number: of(120 - number), "known": lambda number: of(120)}


def number(layers: int) -> dict[str, Call]:
    """Take steps with a Python number that changes, and with one that stays."""
    model = Weighed(layers)
    ids = ids_of(64, 4)
    module = parallel(model, {"ids": ids, "weight": 1.0})

    def of(weight: float) -> None:
        module.zero_grad()
        module.step(ids=ids, weight=weight)

    return {"changing": lambda number: of(0.1 + number), "same": lambda number: of(0.5)}


class Decoder(nn.Module):
    """A decoder with a cache of its own."""

    def __init__(self, layers: int, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, cache: Any = None, labels: Tensor | None = None) -> Any:
        x, held = self.tokens(ids), []
        for at, (qkv, out) in enumerate(zip(self.qkv, self.out)):
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            if cache is not None:
                k, v = torch.cat([cache[at][0], k], 2), torch.cat([cache[at][1], v], 2)
            is_first = cache is None
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_first)
            x = x + out(mixed.transpose(1, 2).flatten(2))
            held.append((k, v))
        logits = self.head(x)
        if labels is None:
            return logits, held
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Weighed(nn.Module):
    """A decoder with a weight of its loss, a number."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.decoder = Decoder(layers)

    def forward(self, ids: Tensor, weight: float) -> Tensor:
        return self.decoder(ids, labels=ids) * weight


CASES: dict[str, Callable[[int], dict[str, Call]]] = {
    "generate": generate,
    "own cache": own_cache,
    "new length": new_length,
    "number": number,
}


def measured(calls: dict[str, Call], rounds: int) -> Iterator[tuple[str, float]]:
    """Yield CPU seconds of each call in turn."""
    for number in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call(WARM + number)
            yield name, time.process_time() - start


def report(name: str, layers: int, rounds: int) -> None:
    """Print the line of a case."""
    start = time.process_time()
    calls = CASES[name](layers)
    for number in range(WARM):
        for call in calls.values():
            call(number)
    first = time.process_time() - start
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    for key, taken in measured(calls, rounds):
        seconds[key].append(taken)
    one, other = seconds.values()
    line: dict[str, Any] = {"case": name, "layers": layers, "first_calls_s": round(first, 2)}
    line |= {key: round(statistics.median(values), 5) for key, values in seconds.items()}
    line["ratio"] = round(statistics.median(a / b for a, b in zip(one, other)), 3)
    line["difference_s"] = round(statistics.median(a - b for a, b in zip(one, other)), 5)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--case", choices=CASES, help="only this case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    for name in [arguments.case] if arguments.case else CASES:
        if name != "generate" or find_spec("transformers") is not None:
            report(name, arguments.layers, arguments.rounds)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
