"""Guards: a question to a value, asked so that forward may end there.

    if (x < 0).any():          the model refuses such values, and its program needs no answer
        raise ValueError

Where forward goes on all the same, because something around the guard catches what it raises, the
question is a choice between two programs, and stays without an answer. So does what is caught of
questions that have none.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.base.user_code import is_users_frame
from autopar.capture.bytecode import passing_answer
from autopar.capture.catching import is_caught
from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced

VALUES = "forward must not depend on the values of tensors, only on their shapes"
_NEED_VALUES = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("item", "tolist", "numpy", "data_ptr"),
)


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
    guard = None if frame is None else passing_answer(frame)
    if guard is None:
        return None
    frame, answer, barred = guard
    return None if is_caught(barred, frame) else answer
