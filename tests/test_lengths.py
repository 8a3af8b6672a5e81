"""A new length of the inputs runs on a program that is known; so do the steps of a generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests import lengths

WAYS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": ap.Mesh(one=1)},
    "tensor parallel": {"mesh": ap.Mesh(tp=2), "mode": "auto"},
    "zero3": {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"},
    "micro-batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "stages": {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_length_trains_on_three_programs(way: str) -> None:
    lengths.trains_at_every_length(**WAYS[way])


@pytest.mark.parametrize("kind", lengths.KINDS)
def test_a_program_is_not_used_across_a_branch(kind: str) -> None:
    lengths.keeps_to_its_branch(kind, mesh=ap.Mesh(one=1))


@pytest.mark.parametrize("way", ["tensor parallel", "zero3", "stages"])
def test_tokens_of_ones_own_cache_are_the_models(way: str) -> None:
    lengths.generates_token_by_token(**WAYS[way])


@pytest.mark.parametrize("way", ["tensor parallel", "stages"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_of_transformers_are_the_models(name: str, way: str) -> None:
    pytest.importorskip("transformers")
    lengths.generates_as_transformers(name, **WAYS[way])


def test_the_callers_own_cache_is_filled_and_returned() -> None:
    transformers = pytest.importorskip("transformers")
    model, ids = lengths.llama().eval(), lengths.ids_of(2, 4)
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    module = ap.parallelize(model, (), example, mesh=ap.Mesh(tp=2)).eval()
    cache, other = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        output = module(input_ids=ids, past_key_values=cache, use_cache=True)
        model(input_ids=ids, past_key_values=other, use_cache=True)
    assert output.past_key_values is cache
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


class Swapping(nn.Module):
    """Adds to the first of two caches, and returns them in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, first: Any, second: Any) -> Any:
        y = self.up(x)
        first.update(y, 2 * y, 0)
        return second, first, y.sum()


def test_caches_are_told_apart_in_another_order() -> None:
    transformers = pytest.importorskip("transformers")
    model, x = Swapping().double(), torch.ones(2, 1, 3, 4, dtype=torch.float64)

    def caches() -> tuple[Any, Any]:
        first, second = transformers.DynamicCache(), transformers.DynamicCache()
        first.update(x, x, 0)
        second.update(3 * x, 5 * x, 0)
        return first, second

    first, second = caches()
    held, (expected, other) = second.layers[0].keys, caches()
    with torch.no_grad():
        module = ap.parallelize(copy.deepcopy(model), (x, *caches()), mesh=ap.Mesh(tp=2))
        output = module(x, first, second)
        model(x, expected, other)
        swapped = {"second": caches()[0], "first": caches()[1]}
        named = ap.parallelize(copy.deepcopy(model), (x,), {**swapped}, mesh=ap.Mesh(one=1))
        returned = named(x, first=swapped["first"], second=swapped["second"])
    assert returned[0] is swapped["second"]
    assert returned[1] is swapped["first"]
    assert output[0] is second
    assert output[1] is first
    assert second.layers[0].keys is held
    torch.testing.assert_close(first.layers[0].values, expected.layers[0].values)


class Silent(nn.Module):
    """Fills a cache that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.model = lengths.llama()

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        return self.model(ids, past_key_values=cache, use_cache=True).logits.mean()


def test_a_cache_that_is_filled_and_not_returned_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    call = lengths.ids_of(2, 4), transformers.DynamicCache()
    with pytest.raises(ap.InvalidInput, match="part of what it returns"):
        ap.plan(Silent(), call, mesh=ap.Mesh(tp=2))
