"""What is taken for a collective that broke: where an error comes from tells, not its words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar._torch import wait_for
from autopar.runtime.failures import is_collective

in_torch = partial(torch.reshape, torch.zeros(2), (3,))  # raises a RuntimeError, as gloo does


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("expected", "call", "given"),
    [
        (False, _raise, ap.ExecutionError("all agree", got="gloo connection.weight timed out")),
        (False, _raise, RuntimeError("mat1 and mat2 in connection.weight, nccl")),
        (False, _raise, OSError("connection refused")),
        (False, lambda call: call(), in_torch),
        (True, _raise, dist.DistNetworkError("lost")),
        (True, _raise, dist.DistStoreError("lost")),
        (True, wait_for, SimpleNamespace(wait=in_torch)),
    ],
)
def test_collectives_are_known_by_their_place(
    expected: bool, call: Callable[[Any], Any], given: Any
) -> None:
    with pytest.raises(Exception) as caught:
        call(given)
    assert is_collective(caught.value) == expected
