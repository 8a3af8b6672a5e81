"""The parts of which pages are made: groups of names, units, progress; and the tours of modules."""

from __future__ import annotations

import doctest
import importlib
import io
import random
import re

import pytest

from autopar.commands.printing import show, show_table
from autopar.plans.grouping import grouped
from autopar.text.progress import reporter
from autopar.text.tables import WIDTH, stacked_table, table, wrap_line


@pytest.mark.parametrize(
    "module",
    [
        "autopar.plans.grouping",
        "autopar.text.units",
        "autopar.text.tables",
        "autopar.solver.forced_choice",
    ],
)
def test_the_tours_in_the_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


ROWS = [
    ("", "a step", "inside nodes", "between nodes", "gradient sums", "memory"),
    ("* Mesh(x=2, y=4): 1 micro-batch", "7.45 ms", "82.4 µs", "80.7 µs", "253 µs", "2.3 GB"),
    (
        "  Mesh(pp=2, x=4): chimera, 2 pipes, order by list, 2 micro-batches",
        *("15.8 ms", "82.4 µs", "0 s", "8.54 ms", "123 GB, too large"),
    ),
]


@pytest.mark.parametrize("make", [table, stacked_table])
def test_tables_are_no_wider_than_a_page(make) -> None:
    names = [
        ("model.layers.{0..31}.self_attn.query_projection.weight", "bf16[25600@tp, 5120]"),
        ("norm.weight", "bf16[16@x@y@z, 128, 1024, 4096, 16]{+x, +y, +z}"),
    ]
    for rows in (ROWS, [(*row, "gradient summed over x, y, z") for row in names]):
        lines = make(rows)
        assert max(map(len, lines)) <= WIDTH
        # Nothing is lost, and no number parts from its unit.
        assert sorted("".join("".join(lines).split())) == sorted(
            "".join("".join(map("".join, rows)).split())
        )
        assert not any(re.search(r"\d$", line) for line in lines)


def test_tables_of_many_columns_part_names_at_last() -> None:
    words = random.Random(0)
    names = ["scattered_product", "recomputation", "x" * 23, "all_gather over x", "f64[16@x, 8]"]
    for _ in range(40):
        count = words.randint(5, 7)
        row = [[words.choice(names) for _ in range(count)] for _ in range(3)]
        lines = table(row)
        assert max(map(len, lines)) <= WIDTH, row
        assert sorted("".join(lines).replace(" ", "")) == sorted(
            "".join(map("".join, row)).replace(" ", "")
        )


def test_a_row_that_is_too_wide_stands_below_its_name() -> None:
    lines = stacked_table(ROWS, 1)
    assert lines == [
        "      a step   inside nodes  between nodes  gradient sums  memory",
        "  * Mesh(x=2, y=4): 1 micro-batch",
        "      7.45 ms  82.4 µs       80.7 µs        253 µs         2.3 GB",
        "  and 1 more",
    ]
    short = [("", "a step"), ("* no pipeline", "531 ms")]
    assert (
        stacked_table(short)
        == table(short)
        == ["                 a step", "  * no pipeline  531 ms"]
    )


def test_lines_part_between_words_alone() -> None:
    line = "  input: bf16[16@x, 128, 256] -> bf16[16, 128, 256], takes 1.07779e-5 s in all of it"
    assert wrap_line(line, width=40) == [
        "  input: bf16[16@x, 128, 256]",
        "    -> bf16[16, 128, 256], takes",
        "    1.07779e-5 s in all of it",
    ]
    assert wrap_line("short") == ["short"]
    assert wrap_line("x" * 100) == ["x" * 100]  # there is no place


def test_groups_differ_in_their_first_number_only():
    names = ["a.0.b.0", "a.1.b.0", "a.3.b.0", "a.1.b.1", "7", "8", "plain"]
    assert grouped((name, "x") for name in names) == [
        ("a.{0..1, 3}.b.0", "x", 3),
        ("a.1.b.1", "x", 1),
        ("{7..8}", "x", 2),
        ("plain", "x", 1),
    ]


def test_many_runs_of_numbers_are_cut_short():
    names = [f"linear_{number}" for number in range(0, 40, 2)]
    assert grouped((name, "x") for name in names) == [("linear_{0, 2, 4, 6, ..., 38}", "x", 20)]


def test_elsewhere_a_line_a_second_is_printed(capsys, monkeypatch):
    seconds = iter([10.0, 10.5, 11.0, 11.9, 12.5])
    monkeypatch.setattr("autopar.text.progress.time.monotonic", lambda: next(seconds))
    with reporter(True) as report:
        for number in range(5):
            report("mesh", f"{number} of 5")
    assert capsys.readouterr().err == "mesh: 0 of 5\nmesh: 2 of 5\nmesh: 4 of 5\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_phases_and_keeps_nothing(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("autopar.text.progress._PATIENCE", -1.0)
    with reporter(None) as report:
        report("mesh", "1 of 3")
    text = terminal.getvalue()
    assert "mesh: 1 of 3" in text
    assert text.rstrip().endswith("\x1b[2K")  # the line is wiped


def test_tables_have_boxes_on_a_terminal_alone(monkeypatch, capsys):
    rows = [("what", "found"), ("a", "[b] 3")]
    show_table(rows)
    assert capsys.readouterr().out == "  what  found\n  a     [b] 3\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    show_table(rows)
    show("a page with [b] 3")
    assert "│ a" in terminal.getvalue()
    assert "[b]" in terminal.getvalue()
    assert "a page with" in terminal.getvalue()
