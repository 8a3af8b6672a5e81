"""States on the host, on processes."""

from __future__ import annotations

from tests.distributed import host
from tests.distributed.forked import assert_all_pass


def test_states_on_the_host() -> None:
    assert_all_pass(host.cases, host.CHECKS, 2, 2)
