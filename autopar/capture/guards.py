"""Guards: a question to a value, asked so that forward may end there.

    if (x < 0).any():          the model refuses such values, and its program needs no answer
        raise ValueError

Where forward goes on all the same, because something around the guard catches what it raises, the
question is a choice between two programs, and stays without an answer. So does what is caught of
questions that have none.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.capture.catching import is_caught, tree_of, value_of
from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced
from autopar.user_code import is_users_frame

VALUES = "forward must not depend on the values of tensors, only on their shapes"
_NEED_VALUES = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("item", "tolist", "numpy", "data_ptr"),
)
Place = tuple[tuple[int, int], tuple[int, int]]  # in a source: where it starts, and ends


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
                if isinstance(self, FakeTensor):
                    kept.append(error)
                raise

        return method

    with contextlib.ExitStack() as stack:
        for name in _NEED_VALUES:
            stack.enter_context(replaced(Tensor, name, noted(getattr(Tensor, name))))
        yield
    for error in kept:  # and forward has gone on
        if any(is_users_frame(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error


def held_guard(frame: FrameType | None) -> bool | None:
    """What a tensor is, asked on a line of the user's, so that the guard there lets it pass."""
    while frame is not None and not is_users_frame(frame):
        if frame.f_globals is vars(torch.nn.functional):  # `if torch.any(variance < 0): raise`
            break  # whose own guards hold as well
        frame = frame.f_back
    if frame is None:
        return None
    place, tree = _place(frame), tree_of(frame.f_code.co_filename)
    guard = next((one for one in _guards(tree) if _contains(one.test, place)), None)
    if guard is None:
        return None
    is_assertion = isinstance(guard, ast.Assert)
    raised = AssertionError if is_assertion else value_of(guard.body[0].exc, frame)
    return None if is_caught(raised, frame) else _truth(guard.test, place, is_assertion)


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
