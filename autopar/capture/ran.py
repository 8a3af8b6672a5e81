"""Ran: the code of the functions that run for a while.

ran = Ran()
with ran.noted():
    block(x)
ran.own          # of the user's code, by identity
ran.functions()  # those of them that have a name in their file
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from autopar.base.user_code import is_users_space


class Ran:
    """Of each function, by the identity of its code: that, and the globals of its file."""

    def __init__(self) -> None:
        self.is_known = True
        self.found: dict[int, tuple[CodeType, dict[str, Any]]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        if sys.gettrace() is not None:  # a debugger, beside which nothing else is told
            self.is_known = False
            yield
            return
        found = self.found

        def called(frame: FrameType, event: str, arg: Any) -> None:
            code = frame.f_code
            if id(code) not in found:
                found[id(code)] = code, frame.f_globals

        sys.settrace(called)
        try:
            yield
        finally:
            self.is_known &= sys.gettrace() is called
            sys.settrace(None)

    @property
    def own(self) -> set[int]:
        return {one for one, (_, space) in self.found.items() if is_users_space(space)}

    def functions(self) -> Iterator[FunctionType]:
        for code, space in self.found.values():
            one = space.get(code.co_qualname)
            if isinstance(one, FunctionType) and one.__code__ is code:
                yield one
