"""`ap.optimizer` on processes."""

from __future__ import annotations

import pytest

from tests.distributed import optimizers
from tests.distributed.forked import assert_all_pass
from tests.sampling import some


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_optimizers_of_local_tensors(ranks: int) -> None:
    checks = some(optimizers.CHECKS[ranks], 2, "optimizers")
    assert_all_pass(optimizers.cases, checks, ranks, ranks)
