"""States on the host, on processes."""

from __future__ import annotations

import pytest

from tests.distributed import host
from tests.distributed.forked import assert_all_pass
from tests.sampling import some


@pytest.mark.sampled(1)
def test_states_on_the_host() -> None:
    assert_all_pass(host.cases, some(host.CHECKS, 2, "host"), 2, 2)
