"""Programs that compute in another dtype than parameters are kept in, on processes."""

from __future__ import annotations

import pytest

from tests.distributed import precision
from tests.distributed.forked import assert_all_pass
from tests.sampling import some


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_compute_in_another_dtype(ranks: int) -> None:
    checks = some(precision.CHECKS[ranks], 2, "precision")
    assert_all_pass(precision.cases, checks, ranks, ranks)
