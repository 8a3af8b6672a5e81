"""TorchScript: functions and modules of `torch.jit.script`, followed operator by operator.

After a few calls TorchScript runs a function as one node of autograd, with a backward of its own
and its operators inside on detached tensors. Followed like that, its gradients would be lost.
Functions are therefore run as they are written while a model is captured; what TorchScript has
compiled is dropped, and compiled again by the calls that come after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autopar.capture.hooks import replaced


@contextmanager
def scripts_run_plainly() -> Iterator[None]:
    """Run functions of TorchScript without its optimizations."""
    with ExitStack() as stack:
        stack.enter_context(torch.jit.optimized_execution(False))
        for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
            stack.enter_context(replaced(kind, "__call__", _uncompiled(kind.__call__)))
        yield


def _uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        function._debug_flush_compilation_cache()
        return call(function, *args, **kwargs)

    return run
