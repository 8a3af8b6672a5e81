"""Habits that make code hard to read, counted from the syntax tree of the library.

`REBUILT` are rooms and files that are still in the language of before: their figures are held
where they are, those of all others near zero.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

REBUILT = (
    *("capture/", "pipeline/stages/stretch.py"),
    *("pipeline/memory/moments.py", "pipeline/memory/long_stages.py"),
    *("pipeline/memory/alike_stages.py", "runtime/execution/block_groups.py"),
    *("solver/fold.py"),
)
# First words of docstrings that go on with a sentence which stands elsewhere.
FRAGMENTS = tuple(
    f"{word} "
    for word in (
        *("The same", "Of", "What", "Those", "That", "Its", "It", "They", "Them"),
        *("And", "Which", "How", "Whose", "Where", "From", "By"),
    )
)
FILLERS = {
    *("about", "asked", "said", "told", "found", "made"),
    *("one", "own", "given", "kept", "there", "beside"),
}
CROWDED = 25  # files directly in a folder


def fragments(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings that cannot be read alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if text.startswith(FRAGMENTS):
                yield text.partition("\n")[0]


def fillers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of variables, not of fields, that say nothing of what they hold."""
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(tree):
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_stored and node.id in FILLERS and id(node) not in fields:
            yield f"{node.id} in line {node.lineno}"


def packed(tree: ast.Module) -> Iterator[str]:
    """Yield the names of tuples that are written down only to be spread into a call."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        tuples = set[str]()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    tuples |= {
                        name for name, value in _pairs(target, node.value) if _is_long(value)
                    }
        for node in ast.walk(function):
            for argument in node.args if isinstance(node, ast.Call) else ():
                value = argument.value if isinstance(argument, ast.Starred) else None
                if isinstance(value, ast.Name) and value.id in tuples:
                    yield f"{value.id} in line {node.lineno}"


def shared_class_names(trees: Mapping[Path, ast.Module]) -> dict[str, list[Path]]:
    """Return the names of classes that mean several things, with where they are."""
    places = defaultdict[str, list[Path]](list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts):
            yield from _pairs(inner, part)
    elif isinstance(target, ast.Name):
        yield target.id, value


def _is_long(value: ast.expr) -> bool:
    return isinstance(value, ast.Tuple) and len(value.elts) > 1
