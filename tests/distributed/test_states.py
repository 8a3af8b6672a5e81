"""Parameters that are kept in pieces, on processes."""

from __future__ import annotations

import pytest

from autopar.runtime.launch import launch
from tests.distributed import states


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_are_kept_in_pieces(ranks: int) -> None:
    heard: dict[int, list[str]] = {}
    launch(
        states.run_all,
        ranks,
        ranks,
        heard=lambda rank, name: heard.setdefault(rank, []).append(name),
    )
    expected = [check.__name__ for check in states.CHECKS[ranks]]
    assert heard == dict.fromkeys(range(ranks), expected)
