"""The house: imports run one way through the rooms, files stay small, links lead inside."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from autopar.strategies.node_info import NodeInfo
from tests import habits

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "autopar"
LONGEST = 450  # lines
LONGEST_OF_PLANNER = 350
FOLDERS = HOUSE / "runtime" / "checkpoints" / "checkpoint_folders.py"
HIDDEN = {"_cdata", "_local_tensor"}  # memory_of, piece_of

# A room imports from its own floor and from those below.
FLOORS = (
    {
        *("base", "text", "_torch", "cluster"),
        *("errors", "mesh", "layout", "placements", "states", "precision", "recompute"),
        *("defaults", "tensor_type"),
    },
    {"solver"},
    {"collectives"},
    {"strategies"},
    {"nn"},
    {"program"},
    {"capture"},
    {"cost"},
    {"search"},
    {"passes"},
    {"pipeline"},
    {"candidates"},
    {"planner"},
    {"report"},
    {"plans"},
    {"verification"},
    {"runtime"},
    {
        *(
            "annotate",
            "eager_region",
            "options",
            "admission",
            "planning",
            "api",
            "verifying",
            "examples",
        ),
        *("commands", "cli", "__init__", "__main__"),
    },
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(HOUSE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def room(module: str) -> str:
    """The room or door of `autopar.room.…`."""
    return [*module.split("."), "__init__"][1]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """The modules of autopar that a file imports anywhere, also inside functions and for types.

    A name imported from a package counts as the module that has this name, if there is one.
    """
    found: set[str] = set()

    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full, so that this page sees them"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return {name for name in found if name.split(".")[0] == "autopar"}


def test_imports_run_from_the_doors_to_the_words():
    homeless = [module for module in MODULES if room(module) not in FLOOR_OF]
    assert not homeless, "a new room is given its floor here and in ARCHITECTURE.md"
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path)
        if FLOOR_OF[room(other)] > FLOOR_OF[room(module)]
    ]
    assert not wrong


def test_no_circles():
    loads = {module: imported(path) for module, path in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in loads.get(module, ()):
                walk(other, (*path, module))
            done.add(module)

    for module in loads:
        walk(module, ())


def test_imports_load_no_heavy_module():
    """`import autopar` loads no torch; all of autopar loads nothing that one function needs."""
    program = """
import importlib, pkgutil, sys
import autopar
print(*{"numpy", "sympy", "torch"} & sys.modules.keys())
for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
    importlib.import_module(module.name)
heavy = {"jinja2", "networkx", "ortools", "pandas", "torch._dynamo", "torch._inductor"}
print(*heavy & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr


def test_files_are_small():
    for path in FILES:
        longest = LONGEST_OF_PLANNER if HOUSE / "planner" in path.parents else LONGEST
        assert len(path.read_text().splitlines()) <= longest, path


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution has no links")
@pytest.mark.parametrize("name", ["passes", "strategies"])
def test_links_lead_to_the_rooms_that_newcomers_extend(name):
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == HOUSE / name


def test_the_page_shows_this_house():
    """ARCHITECTURE.md lists every room, in the order of the floors."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `autopar/")]
    shown = [row.strip().strip("`").removeprefix("autopar/").strip("/") for row in rows]
    floors = [[FLOOR_OF[name] for name in row.replace(".py", "").split(", ")] for row in shown]
    order = [floor for row in floors for floor in row]
    assert order == sorted(order)
    rooms = {path.name for path in HOUSE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {row for row in shown if (HOUSE / row).is_dir()}
    assert len(list(groupby(order))) <= len(FLOORS)


def test_every_fact_of_a_node_is_explained_where_it_stands():
    lines = inspect.getsource(NodeInfo).splitlines()
    for fact in NodeInfo.__annotations__:
        at = next(n for n, line in enumerate(lines) if line.startswith(f"    {fact}: "))
        assert "# " in lines[at] or lines[at - 1].startswith("    # "), fact


def is_written_in_place(call: ast.Call) -> bool:
    """Whether a call opens a file to write, replaces or renames one."""
    words = [ast.unparse(one) for one in [*call.args, *(one.value for one in call.keywords)]]
    if ast.unparse(call.func) in ("os.rename", "os.replace", "shutil.move", "gzip.open"):
        return True
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if name not in ("open", "fdopen"):
        return name in ("write_text", "write_bytes", "tofile", "mkstemp", "NamedTemporaryFile")
    if words and words[0].startswith(("os.devnull", "os.dup(")):
        return False
    return any(re.fullmatch(r"'[rbt+]*[wax+]\S*'|.*\bO_(WR|RDWR|CREAT).*", word) for word in words)


def test_files_are_written_in_one_place():
    """In `base/files.py`, so that a full disk or a kill leaves what was there; folders of
    checkpoints are renamed as a whole."""
    calls = {
        (path, ast.unparse(node))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and is_written_in_place(node)
    }
    assert {path for path, _ in calls} == {FOLDERS, HOUSE / "base/files.py"}, calls
    assert all("os.rename(" in call for path, call in calls if path == FOLDERS), calls


DESCRIBED = re.compile(r"(str|repr)\([^\n]*map_arg")
OF_A_CALL = {
    "program/equality.py",
    "capture/graph_builder.py",  # of one operator on fake tensors, so that it runs once
    "pipeline/memory/call_memory.py",  # of one rank's call of it, likewise
}


def test_equal_blocks_are_recognised_in_one_place():
    """Elsewhere a node says in which block it stands, and `equality.py` whether two are equal."""
    for path in FILES:
        text, name = path.read_text(), str(path.relative_to(HOUSE))
        assert name in OF_A_CALL or not DESCRIBED.search(text), name
        is_here = name.startswith("program/") or name == "strategies/node_info.py"
        assert is_here or " BlockPlace(" not in text, name
        assert name == "program/equality.py" or "def facts_of_call(" not in text, name


def test_what_tensors_hide_is_read_in_one_place():
    """Whatever of torch's private attributes has a function in `_torch/` is read there alone."""
    for path in FILES:
        nodes = list(ast.walk(parsed(path)))
        named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        named |= {node.value for node in nodes if isinstance(node, ast.Constant)} & HIDDEN
        assert not named & HIDDEN or HOUSE / "_torch" in path.parents, path


def test_no_local_function_refers_to_itself():
    """It would keep all that it closes over till the garbage collector comes."""
    for path in FILES:
        for outer in ast.walk(parsed(path)):
            if isinstance(outer, ast.FunctionDef):
                reads = {
                    local.name: {one.id for one in ast.walk(local) if isinstance(one, ast.Name)}
                    for local in local_functions(outer)
                }
                circles = [name for name in reads if name in reached_from(name, reads)]
                assert not circles, f"{path}:{outer.lineno}"


def local_functions(outer: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    left: list[ast.AST] = [*outer.body]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, ast.ClassDef):
            left.extend(ast.iter_child_nodes(node))


def reached_from(name: str, reads: dict[str, set[str]]) -> set[str]:
    reached, left = set[str](), [name]
    while left:
        others = (reads[left.pop()] & reads.keys()) - reached
        reached |= others
        left.extend(others)
    return reached


# Of each habit how often it may occur in rooms that are not rebuilt, and in the others.
HABITS = {habits.fragments: (0, 218), habits.fillers: (5, 431), habits.packed: (0, 13)}


@pytest.mark.parametrize("habit", HABITS)
def test_names_and_docstrings_can_be_read_alone(habit: Callable[..., Iterator[str]]) -> None:
    found: tuple[list[str], list[str]] = [], []
    for path in FILES:
        name = path.relative_to(HOUSE).as_posix()
        is_rebuilt = name.startswith(habits.REBUILT)
        found[is_rebuilt].extend(f"{name}: {place}" for place in habit(parsed(path)))
    for places, most in zip(found, HABITS[habit]):
        assert len(places) <= most, "\n".join(places)


def test_a_class_name_means_one_thing_and_a_folder_can_be_overlooked() -> None:
    names = habits.shared_class_names({path: parsed(path) for path in FILES})
    assert len(names) <= 8, names
    outside = [
        name
        for name, paths in names.items()
        if any(not str(p.relative_to(HOUSE)).startswith(habits.REBUILT) for p in paths)
    ]
    assert outside == []
    files = Counter(path.parent for path in FILES)
    crowded = {str(f.relative_to(HOUSE)) for f in files if files[f] > habits.CROWDED}
    assert crowded <= {"capture", "planner"}
