"""Telling the user's code from that of Python, torch and autopar.

The module that code belongs to decides, never the file it was read from: a model means the same in
a file, at a prompt, on standard input, in `exec`, or installed as a package.

>>> is_users_frame(sys._getframe(1))
True
>>> is_users_class(torch.nn.Linear)
False
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {
    *("torch", "numpy", "sympy", "autopar", "autopar_start"),
    *("_pytest", "pluggy"),  # which the asserts in a test file call
}
_MODELS = {"autopar.examples", "autopar.commands.demo"}  # models to try things on
_STANDARD = sysconfig.get_paths()["stdlib"]
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
module_name = type.__dict__["__module__"].__get__  # what no metaclass answers
class_name = type.__dict__["__name__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_module_space = vars(ModuleType)["__dict__"].__get__  # what no lazy module answers
_standard: dict[str, tuple[Any, bool]] = {}  # top-level name -> its module, and whether Python's


def is_users_frame(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    return is_users_space(frame.f_globals)


def is_from_user(frame: FrameType) -> bool:
    """Return whether the user's code leads to a frame, through libraries alone: not autopar."""
    outer: FrameType | None = frame
    while outer is not None and not is_users_frame(outer):
        if str(outer.f_globals.get("__name__")).partition(".")[0] == "autopar":
            return False
        outer = outer.f_back
    return outer is not None


def is_users_function(function: FunctionType) -> bool:
    """Return whether a function is the user's code."""
    return is_users_space(function.__globals__)


def is_users_module(module: ModuleType) -> bool:
    """Return whether a module is the user's, without asking the module itself."""
    return is_users_space(_module_space(module))


def is_users_class(kind: type) -> bool:
    """Return whether a class is the user's. Code that `exec` runs in an empty namespace leaves
    classes that claim to be Python's own `builtins`."""
    name = module_name(kind)
    is_made = bool(_flags_of(kind) & _HEAP_TYPE)
    return not _is_library(name) or (name == "builtins" and is_made)


def is_users_space(space: Mapping[str, Any]) -> bool:
    """Return whether the globals of some code are those of a user's module, or of none."""
    return not _is_library(space.get("__name__"))


def _is_library(name: Any) -> bool:
    if type(name) is not str:
        return False
    if name == "__main__":  # `python -m` runs a module by this name
        name = getattr(_spec_of(sys.modules.get(name)), "name", name)
    if name.startswith("namedtuple_"):  # the globals of what `collections.namedtuple` generates
        return True
    top = name.partition(".")[0]
    if top in _LIBRARIES:
        return name not in _MODELS
    return top in sys.stdlib_module_names and _is_standard(top)


def _is_standard(top: str) -> bool:
    """Return whether a module that is named like one of Python's is that, and not a user's file
    that stands before it on the path."""
    module = sys.modules.get(top)
    known, is_pythons = _standard.get(top, (None, False))
    if module is None or module is not known:
        origin = getattr(_spec_of(module), "origin", None) or "built-in"
        is_pythons = origin in ("built-in", "frozen") or (
            origin.startswith(_STANDARD) and "site-packages" not in origin
        )
        _standard[top] = module, is_pythons
    return is_pythons


def _spec_of(module: object) -> Any:
    """Return how a module was imported; None where it was not, or is no module."""
    is_module = issubclass(type(module), ModuleType)
    return _module_space(module).get("__spec__") if is_module else None
