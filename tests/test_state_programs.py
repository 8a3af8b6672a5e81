"""Calls go the model's way, or are refused, by whatever forward goes beside its inputs."""

from __future__ import annotations

import pytest

from tests import state_programs


@pytest.mark.parametrize(
    "kind", ["factor", "branch", "goes back", "entries", "kept alone", "not read"]
)
def test_what_another_call_has_left_is_not_overlooked(kind: str) -> None:
    state_programs.stays_right_or_is_refused(kind)


@pytest.mark.parametrize("kind", ["parameter", "activation", "history", "leaf"])
def test_a_step_goes_by_what_learns_now(kind: str) -> None:
    state_programs.follows_what_learns(kind)


def test_one_cache_in_two_arguments_is_refused() -> None:
    state_programs.refuses_a_shared_cache()


def test_one_list_in_two_arguments_is_refused() -> None:
    state_programs.refuses_a_shared_list()
