"""Schedules as text and CSV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InvalidInput
from autopar.pipeline import Action, from_csv, from_text, load, save, schedule, to_csv, to_text
from autopar.pipeline.notation import parse_action

actions = st.builds(
    Action,
    st.sampled_from("FBIWU"),
    st.integers(0, 20),
    st.integers(0, 200),
    st.lists(st.integers(0, 2000), min_size=1, max_size=3).map(tuple),
)


@given(actions)
def test_an_action_survives_text(action):
    assert parse_action(str(action)) == action


def test_text():
    made = schedule("chimera", stages=2, microbatches=4, scale="doubling")
    assert to_text(made) == "\n".join(
        [
            "name: chimera",
            "microbatches: 4",
            "options: pipes=2 scale=doubling",
            "pipe 0: 0 1",
            "pipe 1: 1 0",
            "rank 0: 0F0 0F1 1F2@1 1F3@1 1B2@1 0B0 1B3@1 0B1",
            "rank 1: 0F2@1 0F3@1 1F0 1F1 1B0 0B2@1 1B1 0B3@1",
        ]
    )
    assert str(made) == to_text(made)


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"schedule.{suffix}"
    for made in (
        schedule("zb-v", stages=3, microbatches=5),
        schedule("dualpipe", stages=4, microbatches=9),
        schedule("chimera", stages=4, microbatches=1, pipes=4),
        schedule("chimera-zb", stages=4, microbatches=4, forward=[1, 1.5, 1, 1e-3], latency=0.5),
    ):
        save(made, path)
        assert load(path) == made


def test_csv_of_one_pipe_is_what_torch_reads():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in ("interleaved", "zb-v", "dualpipe-v"):
        made = schedule(name, stages=4, microbatches=8)
        rows = to_csv(made, header=False).splitlines()
        for row, order in zip(rows, made.orders, strict=True):
            read = [schedules._Action.from_str(cell) for cell in row.split(",")]
            flat = [part for cell in read for part in (cell.sub_actions or [cell])]
            assert [str(part) for part in flat] == [str(action) for action in order]


def test_csv_without_header_keeps_what_actions_say():
    made = schedule("chimera", stages=4, microbatches=8)
    read = from_csv(to_csv(made, header=False), name="chimera")
    assert read == replace(made, options=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rank N"),
        ("rank 0: 0F0 0B0", "no microbatches"),
        ("microbatches: 1\nrank 0: 0F0 0B0", "pipe N"),
        ("microbatches: 1\npipe 0: 0", "rank N"),
        ("microbatches: 1\npipe 0: 0\nrank 1: 0F0", "rank N"),
        ("microbatches: two\npipe 0: 0\nrank 0: 0F0", "whole numbers"),
        ("microbatches: 1\npipe 0: 0\nrank 0: 0F0 0B0\ncolour: red", "colour"),
        ("microbatches: 1\npipe 0: 0\nrank 0: 0F0 0X0", "'0X0'"),
        ("microbatches: 1\npipe 0: 0\nrank 0: 0F0", "no 0B0"),
        ("microbatches: 1\npipe 0: 0\nrank 0: 0F0 0B0 0B0", "0B0 2 times"),
        ("microbatches: 1\npipe 0: 0\nrank 0 0F0 0B0", "key: value"),
        ("microbatches: 1\npipe 0: 3\nrank 0: 0F0 0B0", "rank 3"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(InvalidInput) as error:
        from_text(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "every stage"),
        ("0F0,0B0\n0F1,0B1\n", "each stage of a pipe is on one rank"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 of pipe 0"),
        ("0F0,0F1,0B0\n", "no 0B1"),
        ("0F0,hello\n", "'hello'"),
    ],
)
def test_bad_csv(text, message):
    with pytest.raises(InvalidInput) as error:
        from_csv(text, "mine.csv")
    assert message in str(error.value)
    assert "mine.csv" in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidInput, match="text or CSV file"):
        load(tmp_path / "none.txt")
