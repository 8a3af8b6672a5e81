"""Each of these tests starts processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def start(warm_ranks: None) -> None:
    """Warm ranks for all."""
