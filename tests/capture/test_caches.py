"""A capture leaves nothing in what a model keeps in functions, classes and files."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from tests.capture import tables

OLD = torch.arange(2)
TABLES: dict[str, dict[int, Tensor]] = {"places": {2: OLD}, "none": {}}
SEEN: list[Any] = ["first"]
ONLY: Tensor | None = None


@lru_cache(maxsize=4)
def places(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32)


class Keeps(nn.Linear):
    """A layer that keeps tables wherever one can."""

    table: ClassVar[Any] = None
    tables: ClassVar[dict[int, Tensor]] = {}

    @lru_cache  # noqa: B019
    def of_method(self, count: int) -> Tensor:
        return torch.arange(count) * 6.0

    def forward(self, x: Tensor) -> Tensor:
        global ONLY
        count = x.shape[-1]
        if count not in TABLES["places"]:
            TABLES["places"][count] = torch.arange(count) * 7.0
        if ONLY is None:
            ONLY = torch.arange(count) * 8.0
        if Keeps.table is None:
            Keeps.table = torch.arange(count) * 9.0
        if count not in self.tables:
            self.tables[count] = torch.arange(count) * 10.0
        SEEN.append(x)
        own = places(count) + self.of_method(count) + self.tables[count] + Keeps.table
        others = sum(tables.pair(count)) + tables.by_count(count) + tables.last(count)
        kept = TABLES["places"][count] + ONLY + tables.wrapped(count)
        return super().forward(x + own + others + kept).square().mean()


class Fails(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y > 0 else y + 1


def operators(captured: Captured) -> list[str]:
    return [str(node.target) for node in captured.operators]


@pytest.mark.parametrize("is_filled", [False, True])
def test_the_model_runs_afterwards_and_is_captured_again(is_filled: bool) -> None:
    torch.manual_seed(0)
    model, x = Keeps(4, 4), torch.randn(3, 4)
    expected = model(x) if is_filled else None
    first = capture(model, (x,))
    assert TABLES["places"][2] is OLD
    assert set(TABLES) == {"places", "none"}
    assert [type(one) for one in SEEN] == [str] + [Tensor] * is_filled
    with pytest.raises(InvalidInput):
        capture(Fails(4, 4), (x,))
    assert operators(capture(model, (x,))) == operators(first)
    found = model(x)
    assert expected is None or torch.equal(found, expected)
    for table in (ONLY, Keeps.table, places(4), tables.LAST, *tables.pair(4), model(x)):
        assert type(table) is Tensor
    _clear()


def _clear() -> None:
    global ONLY
    ONLY = Keeps.table = tables.LAST = None
    SEEN[:] = ["first"]
    for table in (TABLES["places"], Keeps.tables, tables.BY_COUNT):
        table.clear()
    TABLES["places"][2] = OLD
    for cached in (places, Keeps.of_method, tables.pair):
        cached.cache_clear()
