"""Programs that take numbers as inputs compute what Python does, however forward uses them."""

from __future__ import annotations

from typing import Any

import pytest

import autopar as ap
from tests import number_programs

WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "stages": {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 2},
}


@pytest.mark.parametrize("kind", sorted(number_programs.KINDS.keys() - {"indexed"}))
def test_every_float_is_computed_as_in_python(kind: str) -> None:
    numbers = number_programs.FLOATS
    number_programs.computes_with_every_number(kind, numbers, mesh=ap.Mesh(one=1))


@pytest.mark.parametrize("kind", number_programs.KINDS)
def test_every_whole_number_is_computed_as_in_python(kind: str) -> None:
    numbers = number_programs.WHOLES
    number_programs.computes_with_every_number(kind, numbers, mesh=ap.Mesh(one=1))
