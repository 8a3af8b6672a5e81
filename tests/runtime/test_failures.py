"""Failures of ranks: which failure is named, and which errors are taken for broken collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar._torch.communication import wait_for
from autopar.runtime.launching import failures
from autopar.runtime.launching.failures import is_collective_error
from autopar.runtime.launching.rank_liveness import RankLiveness


def test_what_others_did_with_a_refused_call() -> None:
    """They refuse it too, some later; one goes on with it; one does not come to it in time."""
    store = dist.HashStore()
    first, second, third = (RankLiveness(store, rank, 3) for rank in range(3))
    for liveness in (first, second, third):
        liveness.record_refusal("no", 5.0)
    assert first.await_refusals(5.0) == ""
    first.record_refusal("no", 5.0)
    third.record_refusal("no", 5.0)
    late = first.await_refusals(0.2)
    assert late.startswith("0.2 s later others have not come to that call: rank 1 is at ")
    assert "rank 2" not in late
    second.call_count += 1
    assert third.await_refusals(5.0).startswith("rank 1 went on with that call, and is at ")
    for liveness in (first, second, third):
        liveness.close()


def test_all_ranks_hear_of_the_same_first_failure() -> None:
    """Also those that fail later, and those whose collective broke because of it."""
    store = dist.HashStore()
    ranks = [RankLiveness(store, rank, 3) for rank in range(3)]
    assert ranks[1].report_failure("rank 1: ValueError: one", 5.0) == "rank 1: ValueError: one"
    assert ranks[2].report_failure("rank 2: KeyError: two", 5.0) == "rank 1: ValueError: one"
    ranks[0].ask_positions(5.0)
    assert [liveness.first_failure for liveness in ranks] == ["rank 1: ValueError: one"] * 3
    for liveness in ranks:
        liveness.close()


@pytest.mark.parametrize("first", ["rank 0: ValueError: one", None])
def test_a_broken_collective_is_put_down_to_the_first_failure(
    first: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody says that it failed, a rank was lost."""
    liveness = SimpleNamespace(
        open_guards=0, pending_refusal=None, first_failure=first, ask_positions=lambda patience: {}
    )
    world: Any = SimpleNamespace(liveness=liveness, rank=1, size=2, ended_by=None, is_second=False)
    for name, value in (
        ("joined", lambda: world),
        ("_require_common_refusal", bool),
        ("abort_groups", int),
    ):
        monkeypatch.setattr(failures, name, value)
    rule = "another rank failed first" if first else "a rank was lost"
    with pytest.raises(ap.ExecutionError, match=rule), failures.stop_all_on_failure(world):
        raise dist.DistNetworkError("lost")
    assert (first or "no word from rank 0") in world.ended_by


@pytest.mark.parametrize("is_first", [True, False])
def test_what_one_rank_refuses_alone_is_put_down_to_the_first_failure(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(failure: str, patience: float) -> str:
        return failure if is_first else "rank 0: ValueError: one"

    liveness = SimpleNamespace(
        pending_refusal="rank 1: no",
        report_failure=report,
        await_refusals=lambda patience: "others",
    )
    world: Any = SimpleNamespace(liveness=liveness, rank=1, ended_by=None, is_second=True)
    monkeypatch.setattr(failures, "require_living", lambda world: None)
    monkeypatch.setattr(failures, "world_timeout", lambda: timedelta(seconds=1))
    rule = "all ranks refuse a call, or none" if is_first else "another rank failed first"
    with pytest.raises(ap.ExecutionError, match=rule), failures.local_checks(world):
        pytest.fail("the call goes on")


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
    assert is_collective_error(caught.value) == expected


def test_an_error_that_all_ranks_have_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is another one, it says who was first."""
    liveness = SimpleNamespace(
        open_guards=0, pending_refusal=None, report_failure=lambda failure, patience: first
    )
    world: Any = SimpleNamespace(liveness=liveness, rank=1, ended_by=None, is_second=False)
    for name, value in (
        ("joined", lambda: world),
        ("_require_common_refusal", bool),
        ("abort_groups", int),
    ):
        monkeypatch.setattr(failures, name, value)
    for first, kind in (
        ("rank 0: IndexError: index out of range", IndexError),
        ("rank 0: IndexError: another index", ap.ExecutionError),
    ):
        with pytest.raises(kind, match="index"), failures.stop_all_on_failure(world):
            raise IndexError("index out of range")
        assert world.ended_by == first
