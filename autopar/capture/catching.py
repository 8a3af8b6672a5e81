"""Catching: whether forward may go on after what one of its lines raises.

Around the line stand `try` statements, and `with` statements whose managers may swallow.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import linecache
from collections.abc import Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

from autopar.user_code import is_users_frame, is_users_space

_EXPORT = "torch.export"  # calls forward
_BREAKS = (ast.Return, ast.Break, ast.Continue)
Try = ast.Try | ast.TryStar


def is_caught(raised: Any, frame: FrameType | None) -> bool:
    """Whether forward may go on after an exception of this class (None: of any) in a frame."""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_EXPORT):
        for kinds, ends in _handlers(frame):
            if any(_may_be(raised, kind) for kind in kinds):
                if not ends:
                    return True
                raised = None  # another one takes its place
        frame = frame.f_back
    return False


def _may_be(raised: Any, kind: Any) -> bool:
    are_known = isinstance(raised, type) and isinstance(kind, type)
    return not are_known or issubclass(raised, kind)


def _handlers(frame: FrameType) -> Iterator[tuple[Sequence[Any], bool]]:
    """What is caught around the line where a frame stands, innermost first: the classes (None: one
    that is not known), and whether another exception follows."""
    code = frame.f_code
    if frame.f_globals is vars(contextlib) and code.co_name == "inner":  # a decorator
        manager = frame.f_locals.get("self")
        if _may_swallow(getattr(manager, "func", type(manager))):
            yield [None], False
    if not is_users_frame(frame):
        return
    tree = tree_of(code.co_filename)
    if tree is None:
        if code.co_exceptiontable:
            yield [None], False
        return
    around = [node for node in ast.walk(tree) if _encloses(node, frame)]
    for node in sorted(around, key=lambda node: -node.lineno):  # type: ignore[attr-defined]
        if isinstance(node, ast.With):
            for item in reversed(node.items):
                yield _swallowed(item.context_expr, frame), False
            continue
        assert isinstance(node, Try)
        if _is_between(node.body, frame):
            for one in node.handlers:
                kinds = one.type.elts if isinstance(one.type, ast.Tuple) else [one.type]
                ends = isinstance(one.body[-1], ast.Raise)
                yield [BaseException if k is None else value_of(k, frame) for k in kinds], ends
        if any(isinstance(one, _BREAKS) for part in node.finalbody for one in ast.walk(part)):
            yield [BaseException], False


def _encloses(node: ast.AST, frame: FrameType) -> bool:
    """Whether a frame stands in a statement of its own function that may catch what it raises."""
    if not isinstance(node, Try | ast.With) or node.lineno < frame.f_code.co_firstlineno:
        return False
    others = () if isinstance(node, ast.With) else (*node.handlers, *node.orelse)
    return _is_between((*node.body, *others), frame)


def _is_between(parts: Sequence[Any], frame: FrameType) -> bool:
    return parts[0].lineno <= frame.f_lineno <= (parts[-1].end_lineno or 0)


def _swallowed(manager: ast.expr, frame: FrameType) -> Sequence[Any]:
    """The classes of exceptions that a manager may swallow."""
    if isinstance(manager, ast.IfExp):
        return [*_swallowed(manager.body, frame), *_swallowed(manager.orelse, frame)]
    value = value_of(manager, frame)
    if isinstance(manager, ast.Call) and value is contextlib.suppress:
        return [value_of(kind, frame) for kind in manager.args]
    if not isinstance(manager, ast.Call) and value is not None:
        value = type(value)
    return [None] if _may_swallow(value) else []


def _may_swallow(made_by: Any) -> bool:
    """Whether the managers that a function or class makes may swallow exceptions."""
    function = inspect.unwrap(made_by) if callable(made_by) else made_by
    is_generator = inspect.isgeneratorfunction(function)
    if isinstance(function, type):
        if issubclass(function, contextlib.ExitStack | contextlib.suppress):
            return True
        function = inspect.unwrap(getattr(function, "__exit__", function))
    code = getattr(function, "__code__", None)
    if made_by is None or code is None:
        return made_by is None  # what is built in lets them pass
    if not is_users_space(function.__globals__):
        return False
    body = _function(tree_of(code.co_filename), code.co_firstlineno)
    if body is None or not (is_generator or function is not inspect.unwrap(made_by)):
        return True  # not seen
    if is_generator:
        tries = [node for node in ast.walk(body) if isinstance(node, Try)]
        return any(not isinstance(h.body[-1], ast.Raise) for one in tries for h in one.handlers)
    returns = [node.value for node in ast.walk(body) if isinstance(node, ast.Return) and node.value]
    return any(not (isinstance(one, ast.Constant) and not one.value) for one in returns)


def _function(tree: ast.Module | None, line: int) -> ast.AST | None:
    """The function that starts on a line, with its decorators."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] if tree else []
    starts = (min(n.lineno, *(d.lineno for d in n.decorator_list), n.lineno) for n in found)
    return next((node for node, start in zip(found, starts, strict=True) if start == line), None)


def tree_of(file: str) -> ast.Module | None:
    """What stands in a file."""
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def value_of(name: ast.expr | None, frame: FrameType) -> Any:
    """What a name is, or that of what is called; None where that is not seen."""
    if isinstance(name, ast.Call):
        return value_of(name.func, frame)
    if isinstance(name, ast.Attribute):
        return getattr(value_of(name.value, frame), name.attr, None)
    if not isinstance(name, ast.Name):
        return None
    spaces = frame.f_locals, frame.f_globals, vars(builtins)
    return next((space[name.id] for space in spaces if name.id in space), None)
