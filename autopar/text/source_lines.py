"""Lines of the user's code, as messages show them.

>>> caller()
'train.py:12: module = ap.parallelize(model, (x,), mesh=mesh)'
"""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

from autopar.base.user_code import is_users_frame

LONGEST = 100  # characters of a line that are shown


def caller(inner: FrameType | None = None) -> str | None:
    """Return the user's line that led here: the innermost outside autopar, torch and Python.

    With `inner`, a frame of another thread, return the line that led to that frame.
    """
    for frame, _ in traceback.walk_stack(inner or sys._getframe(1)):
        if is_users_frame(frame):
            return describe(frame.f_code.co_filename, frame.f_lineno)
    return None


def frames_to_caller() -> int:
    """Return the `stacklevel` with which a warning points at the user's line."""
    frames = traceback.walk_stack(sys._getframe(1))
    return next((level for level, (frame, _) in enumerate(frames, 1) if is_users_frame(frame)), 1)


def describe(file: str, line: int, text: str | None = None) -> str:
    """Return a source line for people: a short path, the number and the text.

    Code that was typed, piped or generated stands in no file: `<stdin>, line 3`.
    """
    text = shorten((text or linecache.getline(file, line)).strip())
    place = f"{file}, line {line}" if file.startswith("<") else f"{_short(file)}:{line}"
    return place + (f": {text}" if text else "")


def shorten(text: str) -> str:
    """Return as much of a text as a message shows."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def _short(file: str) -> str:
    if "/site-packages/" in file:
        return file.rsplit("/site-packages/", 1)[1]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # elsewhere, or the working directory was deleted
        return file
