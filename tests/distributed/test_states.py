"""Parameters that are kept in pieces, on processes."""

from __future__ import annotations

import pytest

from tests.distributed import states
from tests.distributed.forked import assert_all_pass
from tests.sampling import some


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_are_kept_in_pieces(ranks: int) -> None:
    checks = some(states.CHECKS[ranks], 6 // ranks, "states")
    assert_all_pass(states.cases, checks, ranks, ranks)
