"""States on the host, on processes."""

from __future__ import annotations

from autopar.runtime.launch import launch
from tests.distributed import host


def test_states_on_the_host() -> None:
    heard: dict[int, list[str]] = {}
    launch(host.run_all, 2, 2, heard=lambda rank, name: heard.setdefault(rank, []).append(name))
    expected = [check.__name__ for check in host.CHECKS]
    assert heard == dict.fromkeys(range(2), expected)
