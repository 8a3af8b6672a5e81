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
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy
import sympy
import torch
from torch.fx import proxy
from torch.fx.proxy import TracerBase

from autopar.lines import describe

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in .*)?(?:\n\s+(?P<text>.*))?')
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_LIBRARIES = tuple(
    str(Path(module).parent) + "/"
    for module in (torch.__file__, numpy.__file__, sympy.__file__, Path(__file__).parent)
)


# Models to try things on are read as those of a user.
_MODELS = tuple(
    str(Path(__file__).parents[1] / file) for file in ("examples.py", "commands/demo.py")
)


@contextmanager
def whole_stacks(files: set[str]) -> Iterator[None]:
    """Let export record functions called from forward too, not only the lines of forward itself;
    the `files` of all are noted."""

    def inside(_: object, stack: traceback.StackSummary) -> traceback.StackSummary:
        found = _inside_forward(stack)
        files.update(frame.filename for frame in found)
        return found

    # Seen in torch 2.13: the frames that a tracer keeps are chosen by this method alone.
    before = getattr(TracerBase, "_filter_traceback_frames", None)
    if before is None:  # without it the lines of forward are recorded, which is enough to work
        yield
        return
    stacks = getattr(proxy, "CapturedTraceback", None)
    TracerBase._filter_traceback_frames = inside  # type: ignore
    if stacks is not None:
        proxy.CapturedTraceback = _Frames  # type: ignore
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = before  # type: ignore[method-assign]
        if stacks is not None:
            proxy.CapturedTraceback = stacks  # type: ignore


class _Frames:
    """In place of torch's traceback, which looks up the text of every line of every node: those
    around export are the same for all, and most of those inside are torch's."""

    def __init__(self, innermost: FrameType) -> None:
        self.innermost = innermost

    @classmethod
    def extract(cls) -> _Frames:
        return cls(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        found, frame = [], self.innermost
        while frame is not None and frame.f_code is not _EXPORT:
            code = frame.f_code
            if code.co_name == "forward" or is_users(code.co_filename):
                about = code.co_filename, frame.f_lineno, code.co_name
                found.append(traceback.FrameSummary(*about, lookup_line=False))
            frame = frame.f_back  # type: ignore[assignment]
        return traceback.StackSummary.from_list(found[::-1])


_EXPORT = inspect.unwrap(torch.export.export).__code__


def _inside_forward(stack: traceback.StackSummary) -> traceback.StackSummary:
    names = [frame.name for frame in stack]
    start = names.index("forward") if "forward" in names else len(names)
    return traceback.StackSummary.from_list([f for f in stack[start:] if is_users(f.filename)])


def of_stack(stack: str | None) -> str | None:
    """`file:line: text` of the innermost frame that is neither torch's nor autopar's."""
    frame = _frame_of(stack or "")
    return frame and describe(frame["file"], int(frame["line"]), frame["text"])


@lru_cache(maxsize=1024)  # many nodes have one, those of blocks that are copied at least
def _frame_of(stack: str) -> re.Match[str] | None:
    frames = [match for match in _FRAME.finditer(stack) if is_users(match["file"])]
    found: re.Match[str] | None = _innermost(frames, lambda match: match["file"])
    return found


def of_traceback(trace: TracebackType | None) -> str | None:
    """The same for the traceback of an exception."""
    frame = _users_frame(trace)
    return frame and describe(frame.filename, frame.lineno or 0, frame.line)


def lines_before(trace: TracebackType | None, count: int = 3) -> str:
    """That line and some before it."""
    frame = _users_frame(trace)
    if frame is None or frame.lineno is None:
        return ""
    numbers = range(max(frame.lineno - count, 1), frame.lineno + 1)
    return "".join(linecache.getline(frame.filename, number) for number in numbers)


def _users_frame(trace: TracebackType | None) -> Any:
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    return _innermost(frames, lambda frame: frame.filename)


def passes_through(trace: TracebackType | None, file: str) -> bool:
    """Whether a frame of the traceback stands in a file whose path ends so."""
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(trace))


def _innermost(frames: list[Any], file: Callable[[Any], str]) -> Any:
    """The last frame; in transformers, the last of a model's own file before its helpers."""
    inner = list(reversed(frames))
    if inner and "/transformers/" in file(inner[0]):
        models = [frame for frame in inner if os.path.basename(file(frame)).startswith("modeling_")]
        inner = models or inner
    return inner[0] if inner else None


def is_users(file: str) -> bool:
    """Whether a frame's file is the user's: not of torch, autopar or Python itself."""
    is_standard = file.startswith(_STANDARD) and "/site-packages/" not in file
    is_library = file.startswith((*_LIBRARIES, "<")) and file not in _MODELS
    return not is_standard and not is_library
