"""Lines of changes: which line of the user's code changes what stands in a holder.

lines = LinesOfChanges(holders)
with lines:
    model(x)
lines.found    # by place: "train.py:12: self.log.append(y)"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import copy
from types import FrameType
from typing import Any

from autopar.base.user_code import is_users_frame
from autopar.capture.holders import Holder, Place
from autopar.text.source_lines import describe


class LinesOfChanges:
    """Looks after each line that runs. Beside a debugger, which looks as well, nothing is found."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self.found: dict[Place, str] = {}
        self._holders, self._at = [*map(copy, holders)], ("", 0)
        self._is_first = bool(holders) and sys.gettrace() is None

    def __enter__(self) -> None:
        if self._is_first:
            sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        if self._is_first:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._looked if is_users_frame(frame) else None

    def _looked(self, frame: FrameType, event: str, arg: Any) -> Any:
        for holder in self._holders:
            if places := [change.place for change in holder.changes()]:
                self.found = dict.fromkeys(places, describe(*self._at)) | self.found
                holder.held = holder.read()
        is_over = event == "return"
        at = (
            next((one for one in _outer(frame.f_back) if is_users_frame(one)), frame)
            if is_over
            else frame
        )
        self._at = at.f_code.co_filename, at.f_lineno
        return self._looked


def _outer(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
