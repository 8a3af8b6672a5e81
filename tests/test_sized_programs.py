"""Programs that serve other sizes compute what the model does, however it looks at its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar as ap
from tests import sized_programs

# Each looked the same at three sizes, and was another program at a fourth.
ONCE_WRONG = (
    "by isinstance",
    "by name",
    "by item",
    "by item of constant",
    "of degree 3",
    "in eval",
    "truth",
    "cached",
)
OTHERS = sorted(sized_programs.KINDS.keys() - ONCE_WRONG)
WAYS: dict[str, dict[str, Any]] = {
    "cut batch": {"mesh": ap.Mesh(dp=2), "mode": "data"},
    "micro-batches": {"mesh": ap.Mesh(one=1), "microbatches": 2},
}


@pytest.mark.parametrize("kind", ONCE_WRONG)
def test_a_program_that_looks_alike_is_not_taken(kind: str) -> None:
    sized_programs.computes_at_every_length(kind, mesh=ap.Mesh(one=1))


@pytest.mark.parametrize("kind", OTHERS)
def test_every_length_gives_what_the_model_does(kind: str) -> None:
    lengths = (4, 5, 6, 9, 12, 3, 1)
    sized_programs.computes_at_every_length(kind, lengths, (True,), mesh=ap.Mesh(one=1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["by name", "of degree 3", "window", "dropped"])
def test_parallel_programs_give_what_the_model_does(kind: str, way: str) -> None:
    lengths = (4, 5, 6, 9, 12, 3)
    sized_programs.computes_at_every_length(kind, lengths, (True, False), **WAYS[way])


def test_a_rehearsal_leaves_nothing_behind() -> None:
    x = sized_programs.inputs_of(4)
    module = ap.parallelize(sized_programs.Logging().double(), (x,), mesh=ap.Mesh(one=1))
    generator = torch.get_rng_state()
    for length in (4, 5, 6, 7, 8, 12, 12):
        sized_programs.LOG.clear()
        module.step(sized_programs.inputs_of(length))
        assert [length] * (length >= sized_programs.LIMIT) == sized_programs.LOG
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(module.programs) == 4
