"""A Python number in the arguments is an input, unless a branch or a shape needs its value."""

from __future__ import annotations

from typing import Any

import pytest

import autopar as ap
from tests import numbers

MESHES: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": ap.Mesh(one=1)},
    "zero2": {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero2"},
}


@pytest.mark.parametrize("kind", numbers.PROGRAMS)
@pytest.mark.parametrize("way", MESHES)
def test_a_number_that_changes_is_an_input(kind: str, way: str) -> None:
    numbers.takes_numbers(kind, **MESHES[way])
