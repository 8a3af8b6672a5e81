"""Parts: operators that torch makes of others are these, where each has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.support import program, random, targets

KNOWN = (
    "cat reshape unsqueeze repeat mul slice add sub div sum cumsum select expand flatten stack "
    "argsort remainder gather flip sort result"
)
library = torch.library.Library("tests_parts", "DEF")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", lambda x: x * 2, "CompositeExplicitAutograd")


def composite(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.tests_parts, name)  # type: ignore[no-any-return]


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.ops.aten.softmax.int(x, -1)
    return torch.ops.aten.mul.Tensor(x, weights)


def changed(x: Tensor) -> Tensor:
    y = torch.ops.aten.cos.default(x)
    return torch.ops.aten.add_.Tensor(y, x)


def unrolled(x: Tensor) -> Tensor:
    for _ in range(65):
        x = torch.ops.aten.sin.default(x)
    return x


CHANGED = composite("changed", changed)
WHOLE = {
    "a part without a rule": composite("made_of_opaque", torch.ops.tests_parts.opaque),
    "a part without a gradient": composite("without_gradient", without_gradient),
    "parts of many steps": composite("unrolled", unrolled),
    "a tensor that torch makes in passing": composite("passing", lambda x: x + torch.tensor(1.0)),
}


def captured(function: Callable[[Tensor], Any], *shape: int) -> list[str]:
    return targets(program(lambda self, x: function(self.linear(x)), random(*shape)))[2:]


def test_an_operator_is_its_parts() -> None:
    found = {
        "stacks": lambda h: (torch.hstack([h, h]), torch.vstack([h, h]), torch.dstack([h, h])),
        "columns": lambda h: torch.column_stack([h[:, 0], h]),
        "tiles": lambda h: torch.tile(h, (2, 3)),
        "rows": lambda h: torch.atleast_3d(h) * 2,
        "heights": lambda h: (torch.trapezoid(h, dx=2.0), torch.cumulative_trapezoid(h)),
        "slopes": lambda h: torch.gradient(h, dim=1)[0],
        "along": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
        "grids": lambda h: torch.meshgrid(h[0], h[1], indexing="ij"),
        "pairs": lambda h: torch.cartesian_prod(h[0], h[1]),
        "flips": lambda h: (torch.fliplr(h), torch.flipud(h), torch.msort(h)),
        "sizes": lambda h: h.sum_to_size(1, 4),
    }
    for name, function in found.items():
        assert set(captured(function, 3, 4)) <= set(KNOWN.split()), name


def test_a_part_that_writes_is_functional() -> None:
    assert captured(CHANGED, 3, 4) == ["cos", "add"]


def test_a_view_made_of_parts_may_be_changed() -> None:
    def forward(h: Tensor) -> Tensor:
        row = h[0].clone()
        torch.atleast_2d(row)[0, 1:] += 1
        return row * 2

    assert "slice_scatter" in captured(forward, 3, 4)


@pytest.mark.parametrize("name", WHOLE)
def test_some_stay_whole(name: str) -> None:
    operator = WHOLE[name]
    given = (lambda h: h.detach()) if name == "a part without a rule" else lambda h: h
    found = captured(lambda h: h + operator(given(h)), 3, 4)
    assert [one.partition(".")[0] for one in found].count("tests_parts") == 1
    assert len(found) <= 3
