"""Compile flags: what `torch.compiler.is_exporting` and its like answer.

Private facts of torch: the context in which export follows a function.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def as_exported() -> AbstractContextManager[Any]:
    """Within, torch answers that code is exported; the call loads torch's compiler."""
    from torch._export.utils import _compiling_state_context

    context: AbstractContextManager[Any] = _compiling_state_context()
    return context
