"""Warned: which warnings of a capture the user sees.

Shown are those of the user's code, and those of a library about what that code calls, as of a loss
about its target. Left out are torch's own logs, and its warnings about what a capture does. What
code warns decides, never the line at which the warning points: frames of torch and autopar stand
between, so that one that points at nothing of the user's is moved to the user's line.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import FrameType
from typing import Any

from autopar.base.user_code import is_users_frame

_WARNED: dict[Any, Any] = {}  # what was shown, so that it is shown once
_TRACING = {"export", "fx", "jit", "library"}  # of torch, beside what it calls private
_MODES = "__torch_function__"  # which hand on what forward calls


@contextmanager
def users_warnings_shown() -> Iterator[None]:
    """Within, which follows forward, leave out torch's logs and warnings about that; afterwards
    show all others once."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed, shown = io.StringIO(), list[tuple[Warning, Any, str, int]]()

    def show(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if not _is_for_users(sys._getframe(1), filename):
            return
        stack = traceback.walk_stack(sys._getframe(1))
        users = [frame for frame, _ in stack if is_users_frame(frame)]
        if users and filename not in {frame.f_code.co_filename for frame in users}:
            filename, line = users[0].f_code.co_filename, users[0].f_lineno
        shown.append((message, category, filename, line))

    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("always")
            warnings.showwarning = show  # type: ignore[assignment]
            yield
        sys.stderr.write(printed.getvalue())  # the user's own; after a failure it is torch's
    finally:
        logging.disable(before)
        for warning in shown:
            warnings.warn_explicit(*warning, registry=_WARNED)


def _is_for_users(frame: FrameType | None, filename: str) -> bool:
    """Return whether the code that warns is the user's, or what that calls in a library."""
    while frame is not None and (_module(frame) == "warnings" or frame.f_code.co_name == _MODES):
        frame = frame.f_back
    if frame is None or is_users_frame(frame):
        return frame is not None
    top, *inner = _module(frame).split(".")
    if top == "autopar":  # which points at the user's line where the warning is for the user
        return filename != frame.f_code.co_filename
    is_private = bool(inner) and inner[0].startswith("_") and inner[0] != "_tensor"
    if top == "torch" and (is_private or {*inner[:1]} & _TRACING):
        return False
    while frame is not None and not is_users_frame(frame):
        if _module(frame) == "autopar.capture.export":  # before forward, or after it
            return False
        frame = frame.f_back
    return frame is not None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
