"""Programs that compute in another dtype than parameters are kept in, on processes."""

from __future__ import annotations

from autopar.runtime.launch import launch
from tests.distributed import precision


def test_programs_compute_in_another_dtype() -> None:
    heard: list[tuple[int, str]] = []
    launch(precision.run_all, 2, 2, heard=lambda rank, name: heard.append((rank, name)))
    expected = [(rank, check.__name__) for rank in range(2) for check in precision.CHECKS]
    assert sorted(heard) == sorted(expected)
