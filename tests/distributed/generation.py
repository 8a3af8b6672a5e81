"""On two processes: tokens are the model's, and new lengths run on programs that are known."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import autopar as ap
from tests import lengths, numbers
from tests.models import Case


def generates_with_its_tensors_cut() -> None:
    lengths.generates_token_by_token(mesh=ap.Mesh(tp=2), mode="auto")


def generates_with_parameters_gathered() -> None:
    lengths.generates_token_by_token(mesh=ap.Mesh(dp=2), mode="data", states="zero3")


def generates_through_stages() -> None:
    lengths.generates_token_by_token(mesh=ap.Mesh(pp=2), schedule="1f1b", microbatches=2)


def generates_as_transformers_does() -> None:
    if find_spec("transformers") is not None:
        for name in ("llama", "gpt2"):
            lengths.generates_as_transformers(name, mesh=ap.Mesh(tp=2), mode="auto")


def trains_at_every_length() -> None:
    lengths.trains_at_every_length(mesh=ap.Mesh(dp=2), mode="data", states="zero2")


def takes_numbers() -> None:
    for kind in ("computed", "branch", "shape"):
        numbers.takes_numbers(kind, mesh=ap.Mesh(dp=2), mode="data")


CHECKS: list[Callable[[], None]] = [
    generates_with_its_tensors_cut,
    generates_with_parameters_gathered,
    generates_through_stages,
    generates_as_transformers_does,
    trains_at_every_length,
    takes_numbers,
]


def cases() -> list[tuple[Case, None]]:
    """Nothing is captured before the ranks are there."""
    return []
