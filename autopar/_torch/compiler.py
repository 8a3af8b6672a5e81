"""Private facts of torch's compiler: its options, its marks, and a function kept out of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

COMPILER_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")  # of `torch.compile`

# `torch.compile` reads this attribute before anything else, to learn whether a module is compiled.
COMPILED_MARK = "_torchdynamo_orig_callable"

Function = TypeVar("Function", bound=Callable[..., Any])


def missing_cpp_compiler() -> str | None:
    """Return why torch's compiler finds no C++ compiler; None if it finds one."""
    from torch._inductor import cpp_builder, exc  # seconds to load

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error).partition("\n")[0]
    return None


def left_uncompiled(function: Function) -> Function:
    """Return `function` such that torch's compiler never looks into it from a compiled caller."""
    disabled: list[Callable[..., Any]] = []  # from the first call: the compiler loads in seconds

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            reason = "a parallel module is compiled"
            disabled.append(torch.compiler.disable(function, reason=reason))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]
