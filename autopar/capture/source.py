"""Where in the user's code an operator stands.

>>> of_stack(node.meta["stack_trace"])
'train.py:12: x = torch.relu(layer(x))'
"""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import TracebackType

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in .*)?(?:\n\s+(?P<text>.*))?')
_LIBRARIES = tuple(
    str(Path(module).parent) + "/"
    for module in (torch.__file__, str(Path(__file__).parent))  # torch/, autopar/
)


def of_stack(stack: str | None) -> str | None:
    """`file:line: text` of the innermost frame that is neither torch's nor autopar's."""
    for match in reversed(list(_FRAME.finditer(stack or ""))):
        if is_users(match["file"]):
            return describe(match["file"], int(match["line"]), match["text"])
    return None


def of_traceback(trace: TracebackType | None) -> str | None:
    """The same for the traceback of an exception."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_users(frame.filename):
            return describe(frame.filename, frame.lineno or 0, frame.line)
    return None


def is_users(file: str) -> bool:
    """Whether a frame's file is outside torch and autopar, and a file at all."""
    return not file.startswith((*_LIBRARIES, "<")) and "importlib" not in file


def describe(file: str, line: int, text: str | None) -> str:
    """One line for people: the path as short as it stays clear, the line and its text."""
    text = (text or linecache.getline(file, line)).strip()
    return f"{_short(file)}:{line}" + (f": {text}" if text else "")


def _short(file: str) -> str:
    if "/site-packages/" in file:
        return file.rsplit("/site-packages/", 1)[1]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
