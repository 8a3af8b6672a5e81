"""Code names: what the code of a model asks for, by the names in it.

A name in code that is never run counts as well: then more is taken for possible than is so.
"""

from __future__ import annotations

from torch import nn

from autopar.capture.python_state import PythonState


def asks_for_classes(model: nn.Module) -> bool:
    """Return whether code of a model asks for the class of anything, as by `type(x) is float`, to
    which a number input gives another answer than to `isinstance`."""
    return "type" in PythonState(model).names
