"""The list of seeded faults stays true: each still applies, and its tests exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.faults import FAULTS

ROOT = Path(__file__).parents[1]


def test_every_fault_applies():
    assert [fault.name for fault in FAULTS if fault.count(ROOT) != 1] == []


def test_names_and_changes_are_different():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.tests and fault.old != fault.new for fault in FAULTS)


def test_the_tests_that_are_named_exist():
    named = {(fault.name, test) for fault in FAULTS for test in fault.tests}
    missing = [pair for pair in sorted(named) if not exists(pair[1])]
    assert not missing


def exists(test: str) -> bool:
    """Return whether a file of tests exists, and the function that a node id names."""
    file, _, function = test.partition("::")
    is_there = (ROOT / file).is_file()
    return is_there and (not function or function.partition("[")[0] in functions_of(file))


@cache
def functions_of(file: str) -> set[str]:
    nodes = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
