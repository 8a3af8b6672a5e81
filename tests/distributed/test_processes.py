"""What only processes can prove: they compute what virtual ranks do, and fail together."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.launch import launch
from tests.distributed import checks, failing


def test_processes_do_what_virtual_ranks_do() -> None:
    heard: dict[int, list[str]] = {}
    launch(checks.run_all, 4, heard=lambda rank, name: heard.setdefault(rank, []).append(name))
    expected = [check.__name__ for check in checks.CHECKS]
    assert heard == dict.fromkeys(range(4), expected)


@pytest.mark.parametrize(
    ("way", "own", "others"),
    [
        ("input", "InvalidInput: an input has the shape", "rank 3: InvalidInput: an input has"),
        ("backward", "ZeroDivisionError: deliberate", "rank 3: ZeroDivisionError: deliberate"),
        ("kill", None, "3; on rank"),
    ],
)
def test_one_rank_fails_and_all_stop(
    way: str, own: str | None, others: str, tmp_path: Path
) -> None:
    """Rank 0 stands farthest from rank 3; the others may not have heard from it when they stop."""
    *survivors, failed = failing.reports(way, tmp_path)
    assert (failed or "").startswith(own or "")
    assert (failed is None) == (own is None)
    for report in survivors:
        assert others in (report or "nothing")
    if way == "kill":
        assert "no word from rank 3; on rank 0" in (survivors[0] or "nothing")


@pytest.mark.parametrize(("way", "schedule"), [("kill", "1f1b"), ("stop", "chimera")])
def test_a_rank_lost_in_a_pipeline_ends_all_others(way: str, schedule: str, tmp_path: Path) -> None:
    """In its backward it is killed, or hangs until the others have waited their time for it."""
    *survivors, failed = failing.reports(way, tmp_path, failing.PIPELINE | {"schedule": schedule})
    assert failed is None
    for rank, report in enumerate(survivors):
        assert report, f"rank {rank} said nothing"
        assert report.startswith("_Stopped: a rank was lost in the middle of a step")
        assert f"3; on rank {rank}" in report
