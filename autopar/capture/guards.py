"""Guards: a question to a value, asked so that forward may end there.

    if (x < 0).any():          the model refuses such values, and its program needs no answer
        raise ValueError

Where forward goes on all the same, because something around the guard catches what it raises, the
question is a choice between two programs, and stays without an answer. So does what is caught of
questions that have none.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any

from torch import Tensor

from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced
from autopar.lines import is_users

_EXPORT = "/torch/export/"  # calls forward
_NEED_VALUES = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("item", "tolist", "numpy", "data_ptr"),
)
Place = tuple[tuple[int, int], tuple[int, int]]  # in a source: where it starts, and ends
Try = ast.Try | ast.TryStar


@contextlib.contextmanager
def refusals_kept() -> Iterator[None]:
    """What forward asks of tensors in vain, and catches, is raised at the end all the same: with
    values there would have been an answer, and another program."""
    kept: list[Exception] = []

    def noted(asked: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                return asked(self, *args, **kwargs)
            except Exception as error:
                if isinstance(self, FakeTensor) and _is_caught(type(error), sys._getframe(1)):
                    kept.append(error)
                raise

        return method

    with contextlib.ExitStack() as stack:
        for name in _NEED_VALUES:
            stack.enter_context(replaced(Tensor, name, noted(getattr(Tensor, name))))
        yield
    if kept:
        raise kept[0]


def held_guard(frame: FrameType | None) -> bool | None:
    """What a tensor is, asked on a line of the user's, so that the guard there lets it pass."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        is_torch = "/torch/nn/functional.py" in frame.f_code.co_filename
        if is_torch:  # whose own guards (`if torch.any(variance < 0): raise`) hold as well
            break
        frame = frame.f_back
    if frame is None:
        return None
    place, tree = _place(frame), _tree(frame.f_code.co_filename)
    guard = next((one for one in _guards(tree) if _contains(one.test, place)), None)
    if guard is None:
        return None
    is_assertion = isinstance(guard, ast.Assert)
    raised = AssertionError if is_assertion else _value(guard.body[0].exc, frame)
    return None if _is_caught(raised, frame) else _truth(guard.test, place, is_assertion)


def _place(frame: FrameType) -> Place:
    """Where that stands of which a frame asks the truth: what was computed last, or a comparison
    that asks for it itself (from Python 3.13 on)."""
    code, at = frame.f_code, frame.f_lasti // 2
    if code.co_code[2 * at] != dis.opmap["COMPARE_OP"]:
        at -= 1
        while at > 0 and code.co_code[2 * at] == dis.EXTENDED_ARG:
            at -= 1
    first, last, column, end = next(islice(code.co_positions(), max(at, 0), None))
    return (first or 0, column or 0), (last or 0, end or 0)


@cache
def _guards(tree: ast.Module | None) -> tuple[Any, ...]:
    """What a program asks so that it may raise."""
    nodes = [] if tree is None else [*ast.walk(tree)]
    raises = (n for n in nodes if isinstance(n, ast.If) and isinstance(n.body[0], ast.Raise))
    asserts = (node for node in nodes if isinstance(node, ast.Assert))
    return (*asserts, *raises)


def _contains(node: ast.expr, place: Place) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= place[0] and place[1] <= end


def _truth(test: ast.expr, place: Place, wanted: bool) -> bool | None:
    """What the question at a place of a test is answered, for the test to be as wanted."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return _truth(test.operand, place, not wanted)
        case ast.BoolOp():  # the others have been asked before, or need not be
            asked = next((one for one in test.values if _contains(one, place)), None)
            return None if asked is None else _truth(asked, place, wanted)
        case ast.Compare():  # by its own truth, not that of what it compares
            parts = (test.left, *test.comparators)
            return None if any(_contains(part, place) for part in parts) else wanted
    return wanted


def _is_caught(raised: Any, frame: FrameType | None) -> bool:
    """Whether forward may go on after an exception of this class (None: of any) in a frame."""
    while frame is not None and _EXPORT not in frame.f_code.co_filename:
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
    if not (is_users(code.co_filename) or code.co_filename.startswith("<")):
        return
    tree = _tree(code.co_filename)
    if tree is None:
        if code.co_exceptiontable:
            yield [None], False
        return
    around = [node for node in ast.walk(tree) if _encloses(node, frame)]
    for node in sorted(around, key=lambda node: -node.lineno):  # type: ignore[attr-defined]
        if isinstance(node, Try):
            for one in node.handlers:
                kinds = one.type.elts if isinstance(one.type, ast.Tuple) else [one.type]
                ends = isinstance(one.body[-1], ast.Raise)
                yield [BaseException if k is None else _value(k, frame) for k in kinds], ends
        elif isinstance(node, ast.With):
            for call in (item.context_expr for item in node.items):
                if isinstance(call, ast.Call) and _value(call, frame) is contextlib.suppress:
                    yield [_value(kind, frame) for kind in call.args], False


def _encloses(node: ast.AST, frame: FrameType) -> bool:
    """Whether a frame stands in the body of a statement of its own function."""
    if not isinstance(node, Try | ast.With) or node.lineno < frame.f_code.co_firstlineno:
        return False
    return node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0)


def _tree(file: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def _value(name: ast.expr | None, frame: FrameType) -> Any:
    """What a name is, or that of what is called; None where that is not seen."""
    if isinstance(name, ast.Call):
        return _value(name.func, frame)
    if isinstance(name, ast.Attribute):
        return getattr(_value(name.value, frame), name.attr, None)
    if not isinstance(name, ast.Name):
        return None
    spaces = frame.f_locals, frame.f_globals, vars(builtins)
    return next((space[name.id] for space in spaces if name.id in space), None)
