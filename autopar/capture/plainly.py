"""Plainly: what forward asks of its surroundings has, while it is followed, the answer of a run.

A model that asks whether it is exported (`if mask is None and not torch.compiler.is_compiling()`)
goes another way then, and is another model. Torch itself is told the truth. So it is with tensors
that a model does not look at as they have no values (`isinstance(mask, FakeTensor)`): those that
are the same in every batch have, and what is asked of them then has an answer (decisions.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, _subclasses

from autopar.base.user_code import is_users_frame
from autopar.capture.fake import FakeTensor

# Torch's own, around functions of users that are not to be compiled: what is followed never is.
_OF_DISABLED = "nonrecursive_disable_wrapper"
_ASKED = (torch.compiler.is_compiling, torch.compiler.is_exporting)


@contextmanager
def answered_plainly() -> Iterator[None]:
    """Within, code that is not torch's finds itself neither compiled nor exported."""
    before = [(asked.__code__, asked.__defaults__) for asked in _ASKED]
    truths = [types.FunctionType(asked.__code__, asked.__globals__) for asked in _ASKED]
    try:
        # Their code, so that those who have imported them by name are answered alike.
        for asked, truth in zip(_ASKED, truths):
            asked.__defaults__ = (partial(_answer, truth),)
            asked.__code__ = _asking.__code__
        yield
    finally:
        for asked, (code, defaults) in zip(_ASKED, before):
            asked.__code__, asked.__defaults__ = code, defaults


@contextmanager
def fakes_told_apart(is_fake: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within, a fake tensor is one to code that is not torch's where `is_fake` says so."""

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            is_asked = is_users_frame(sys._getframe(1))
            return isinstance(value, FakeTensor) and (not is_asked or is_fake(value))

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    kind = Kind("FakeTensor", (), {})

    class Module(types.ModuleType):
        """Where others find the class. Torch compares types with it: it finds its own."""

        @property
        def FakeTensor(self) -> type:
            return kind if is_users_frame(sys._getframe(1)) else FakeTensor

    before = type(_subclasses)
    _subclasses.__class__ = Module
    try:
        yield
    finally:
        _subclasses.__class__ = before


def _asking(answer: Callable[[], bool]) -> bool:
    return answer()


def _answer(truth: Callable[[], bool]) -> bool:
    """The answer to who has called the function that asks."""
    frame = sys._getframe(2)
    # Torch has older functions of these names, which ask the newer ones.
    while frame.f_code.co_name in ("is_compiling", "is_exporting") and frame.f_back is not None:
        frame = frame.f_back
    is_asked = is_users_frame(frame) or frame.f_code.co_name == _OF_DISABLED
    return truth() and not is_asked
