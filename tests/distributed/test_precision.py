"""Programs that compute in another dtype than parameters are kept in, on processes."""

from __future__ import annotations

from tests.distributed import precision
from tests.distributed.forked import assert_all_pass


def test_programs_compute_in_another_dtype() -> None:
    assert_all_pass(precision.cases, precision.CHECKS, 2, 2)
