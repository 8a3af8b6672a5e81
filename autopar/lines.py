"""Lines of the user's code, as messages show them.

>>> caller()
'train.py:12: module = ap.parallelize(model, (x,), mesh=mesh)'
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_LIBRARIES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__))
_LIBRARIES += (str(Path(__file__).parents[1] / "autopar_start.py"),)
LONGEST = 100  # characters of a line that are shown


def caller(inner: FrameType | None = None) -> str | None:
    """The line that led here: the innermost one outside autopar, torch and Python itself.

    Or that led to `inner`, a frame of another thread.
    """
    for frame, _ in traceback.walk_stack(inner or sys._getframe(1)):
        if is_users(frame.f_code.co_filename):
            return describe(frame.f_code.co_filename, frame.f_lineno)
    return None


def frames_to_caller() -> int:
    """The `stacklevel` with which a warning points at that line."""
    frames = traceback.walk_stack(sys._getframe(1))
    files = (frame.f_code.co_filename for frame, _ in frames)
    return next((level for level, file in enumerate(files, 1) if is_users(file)), 1)


def is_users(file: str) -> bool:
    """Whether a frame's file is neither of autopar, nor torch, nor Python itself."""
    is_standard = file.startswith(_STANDARD) and "/site-packages/" not in file
    return not is_standard and not file.startswith((*_LIBRARIES, "<"))


def describe(file: str, line: int, text: str | None = None) -> str:
    """One line for people: the path as short as it stays clear, the line and its text."""
    text = shorten((text or linecache.getline(file, line)).strip())
    return f"{_short(file)}:{line}" + (f": {text}" if text else "")


def shorten(text: str) -> str:
    """As much of a text as a message shows."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def _short(file: str) -> str:
    if "/site-packages/" in file:
        return file.rsplit("/site-packages/", 1)[1]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
