"""Programs that compute in another dtype than parameters are kept in, on processes."""

from __future__ import annotations

import pytest

from tests.distributed import precision
from tests.distributed.forked import assert_all_pass


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_compute_in_another_dtype(ranks: int) -> None:
    assert_all_pass(precision.cases, precision.CHECKS[ranks], ranks, ranks)
