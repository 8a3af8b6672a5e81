"""What only processes can prove: they compute what virtual ranks do, and fail together."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.launching.launch import launch
from tests.distributed import checks, failing, generation, groups, placing, trials
from tests.distributed.forked import assert_all_pass, launch_forked
from tests.sampling import some


@pytest.mark.sampled(1)
def test_processes_do_what_virtual_ranks_do() -> None:
    assert_all_pass(checks.cases, some(checks.CHECKS, 6, "processes"), 4)


@pytest.mark.sampled(1)
def test_ranks_tell_what_they_did() -> None:
    told = some([checks.records_what_each_rank_did, checks.is_profiled_by_name], 1, "told")
    assert_all_pass(checks.recorded, told, 4)


def test_ranks_generate_what_the_model_does() -> None:
    assert_all_pass(generation.cases, some(generation.CHECKS, 2, "generation"), 2)


def test_plans_are_run_to_choose_among_them() -> None:
    assert_all_pass(trials.cases, trials.CHECKS, 2)


def test_each_rank_has_its_pieces_alone(tmp_path: Path) -> None:
    heard: list[str] = []
    launch(placing.run_all, 4, str(tmp_path), heard=lambda rank, name: heard.append(name))
    assert len(heard) == 3 * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("way", "own", "others"),
    [
        ("init", "InvalidInput: initialisers make", "rank 3: InvalidInput: initialisers make"),
        ("input", "InvalidInput: a call that needs a new", "rank 3: InvalidInput: a call that"),
        ("caught", "RankStopped: all ranks refuse a call, or", "rank 3: InvalidInput: a call that"),
        ("backward", "ZeroDivisionError: deliberate", "rank 3: ZeroDivisionError: deliberate"),
        ("loop", "EOFError: no batch is left", "rank 3: EOFError: no batch is left"),
        ("kill", None, "no word from rank 3; on rank"),
        ("early", None, "no word from rank 3; on rank"),
    ],
)
def test_one_rank_fails_and_all_stop(
    way: str, own: str | None, others: str, tmp_path: Path
) -> None:
    """Rank 0 stands farthest from rank 3, and is no more lost than the others that wait."""
    *survivors, failed = failing.reports(way, tmp_path)
    assert (failed or "").startswith(own or "")
    assert (failed is None) == (own is None)
    for report in survivors:
        assert others in (report or "nothing")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("way", "schedule", "lost"), [("kill", "1f1b", 3), ("stop", "chimera", 0)])
def test_a_rank_lost_in_a_pipeline_ends_all_others(
    way: str, schedule: str, lost: int, tmp_path: Path
) -> None:
    """It is killed, or stopped with the store that it holds, which then answers nobody."""
    options = failing.PIPELINE | {"schedule": schedule}
    for rank, report in enumerate(failing.reports(way, tmp_path, options, lost)):
        if rank == lost:
            assert report is None
            continue
        assert report, f"rank {rank} said nothing"
        assert report.startswith("RankStopped: a rank was lost in the middle of a step")
        assert f"no word from rank {lost}{', which holds' if lost == 0 else ';'}" in report
        assert f"; on rank {rank}" in report


def test_no_group_connects_in_the_middle_of_a_step() -> None:
    heard: list[str] = []
    run = groups.runs_with_lazy_communicators
    launch_forked(groups.cases, run, 4, heard=lambda rank, name: heard.append(name))
    assert len(heard) == 4 * len(groups.FORMS)


def test_modules_on_the_same_ranks_share_their_groups() -> None:
    heard: list[str] = []
    run = groups.many_modules_share_groups
    launch_forked(groups.cases, run, 2, heard=lambda rank, word: heard.append(word))
    assert heard == ["shared"] * 2
