"""Gather groups: which parameters are gathered together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.cost.gather_groups import gather_groups


@dataclass(frozen=True)
class Read:
    name: str
    size: int
    first: int

    @property
    def last(self) -> int:
        return self.first


def model() -> list[Read]:
    sizes = {"norm": 1, "up.bias": 4, "up.weight": 40, "down.weight": 40}
    names = [("tokens", 3), *((f"{n}.{name}", s) for n in range(3) for name, s in sizes.items())]
    return [Read(name, size, place) for place, (name, size) in enumerate([*names, ("head", 60)])]


@pytest.mark.parametrize(
    ("buffer_bytes", "expected"),
    [
        (1000, [[3, 1, 4, 40, 40], [1, 4, 40, 40], [1, 4, 40, 40], [60]]),
        (86, [[3], [1, 4, 40, 40], [1, 4, 40, 40], [1, 4, 40, 40], [60]]),
        (50, [[3, 1, 4, 40], [40], [1, 4, 40], [40], [1, 4, 40], [40], [60]]),
        (30, [[3, 1, 4], [40], [40], [1, 4], [40], [40], [1, 4], [40], [40], [60]]),
        (1, [[3], *[[1], [4], [40], [40]] * 3, [60]]),
    ],
)
def test_groups_are_blocks_as_far_as_a_buffer_holds_them(
    buffer_bytes: int, expected: list[list[int]]
) -> None:
    groups = gather_groups(model(), lambda read: read.size, buffer_bytes)
    assert [[read.size for read in group] for group in groups] == expected
