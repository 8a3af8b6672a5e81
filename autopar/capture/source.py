"""Where in the user's code an operator stands.

>>> of_stack(node.meta["stack_trace"])
'train.py:12: x = torch.relu(layer(x))'
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.fx import proxy
from torch.fx.proxy import TracerBase

from autopar.base.user_code import is_users_frame
from autopar.capture.hooks import replaced
from autopar.text.source_lines import describe

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in .*)?(?:\n\s+(?P<text>.*))?')
_EXPORT = inspect.unwrap(torch.export.export).__code__
# Seen in torch 2.13: which frames a tracer keeps is decided by these two alone.
_KEEPS_FRAMES = "_filter_traceback_frames"
_TAKES_FRAMES = "CapturedTraceback"


@contextmanager
def whole_stacks(spaces: dict[int, dict[str, Any]]) -> Iterator[None]:
    """Let export record functions called from forward too, not only the lines of forward itself;
    the globals of all this code are noted in `spaces`, by identity."""
    if not (hasattr(TracerBase, _KEEPS_FRAMES) and hasattr(proxy, _TAKES_FRAMES)):
        yield  # the lines of forward are recorded, which is enough to work
        return
    with (
        replaced(TracerBase, _KEEPS_FRAMES, lambda tracer, stack: stack),
        replaced(proxy, _TAKES_FRAMES, _Frames(spaces)),
    ):
        yield


class _Frames:
    """In place of torch's traceback, which looks up the text of every line of every node: those
    around export are the same for all, and most of those inside are torch's."""

    def __init__(self, spaces: dict[int, dict[str, Any]]) -> None:
        self.spaces = spaces
        self.innermost: FrameType | None = None

    def extract(self) -> _Frames:
        self.innermost = sys._getframe(1)
        return self

    def summary(self) -> traceback.StackSummary:
        """Return the user's frames within the outermost call of a `forward`, outermost first."""
        frame, frames, count = self.innermost, list[traceback.FrameSummary](), 0
        while frame is not None and frame.f_code is not _EXPORT:
            code = frame.f_code
            if is_users_frame(frame):
                place = code.co_filename, frame.f_lineno, code.co_name
                frames.append(traceback.FrameSummary(*place, lookup_line=False))
                self.spaces[id(frame.f_globals)] = frame.f_globals
            if code.co_name == "forward":
                count = len(frames)
            frame = frame.f_back
        self.innermost = None
        return traceback.StackSummary.from_list(frames[:count][::-1])


def of_stack(stack: str | None) -> str | None:
    """`file:line: text` of the innermost of the frames that a node was made in."""
    frame = _frame_of(stack or "")
    return frame and describe(frame["file"], int(frame["line"]), frame["text"])


@lru_cache(maxsize=1024)  # many nodes have one, those of blocks that are copied at least
def _frame_of(stack: str) -> re.Match[str] | None:
    found: re.Match[str] | None = _innermost([*_FRAME.finditer(stack)], lambda match: match["file"])
    return found


def of_traceback(trace: TracebackType | None) -> str | None:
    """The same for the traceback of an exception."""
    frame = _users_frame(trace)
    return frame and describe(*frame)


def lines_before(trace: TracebackType | None, count: int = 3) -> str:
    """That line and some before it."""
    frame = _users_frame(trace)
    if frame is None:
        return ""
    file, line = frame
    return "".join(linecache.getline(file, one) for one in range(max(line - count, 1), line + 1))


def _users_frame(trace: TracebackType | None) -> tuple[str, int] | None:
    """The file and line of the innermost frame of the user's."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if is_users_frame(frame)
    ]
    found: tuple[str, int] | None = _innermost(lines, lambda line: line[0])
    return found


def passes_through(trace: TracebackType | None, module: str) -> bool:
    """Whether a frame of the traceback runs code of a module."""
    return any(f.f_globals.get("__name__") == module for f, _ in traceback.walk_tb(trace))


def _innermost(frames: list[Any], file: Callable[[Any], str]) -> Any:
    """The last frame; in transformers, the last of a model's own file before its helpers."""
    inner = list(reversed(frames))
    if inner and "/transformers/" in file(inner[0]):
        models = [frame for frame in inner if os.path.basename(file(frame)).startswith("modeling_")]
        inner = models or inner
    return inner[0] if inner else None
