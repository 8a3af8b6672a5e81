"""The parts of which pages are made: groups of names, units, progress; and the tours of modules."""

from __future__ import annotations

import doctest
import importlib
import io

import pytest

from autopar.commands.printing import show, show_table
from autopar.plan.grouping import grouped
from autopar.progress import reporter


@pytest.mark.parametrize(
    "module", ["autopar.plan.grouping", "autopar.units", "autopar.solver.forced"]
)
def test_the_tours_in_the_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


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
    monkeypatch.setattr("autopar.progress.time.monotonic", lambda: next(seconds))
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
    monkeypatch.setattr("autopar.progress._PATIENCE", -1.0)
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
