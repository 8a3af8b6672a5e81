"""Maps: what `torch.vmap` makes of a function is followed as its operators on whole tensors.

Export keeps the steps by which torch takes a dim away and gives it back, among them functions that
only count how deep they are: a graph of these cannot be changed. So a function that is mapped is
followed on its own first, where torch has turned it into operators, and these are the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.autocasts import active, switched
from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced
from autopar.lines import is_users


class _SwitchesKept(TorchFunctionMode):
    """Where gradients are switched on and off is a part of what is followed."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tracing = get_proxy_mode() if function is torch._C._set_grad_enabled else None
        if tracing is not None:
            tracing.tracer.create_node("call_function", function, args, {})
        return function(*args, **(kwargs or {}))


@contextmanager
def maps_are_operators() -> Iterator[None]:
    """Within, a mapped function is the operators that it comes to."""
    plain, depth = torch.vmap, 0

    def vmap(function: Callable[..., Any], *how: Any, **named: Any) -> Callable[..., Any]:
        mapped = plain(function, *how, **named)
        if not is_users(sys._getframe(1).f_code.co_filename):
            return mapped  # torch's own, as in a mask of blocks: `mapped.py` writes them out

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            modes = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
            if depth or not modes:  # one in another is followed as a part of that
                return mapped(*args, **kwargs)

            autocasts = active()

            def follow() -> Any:
                nonlocal depth
                depth += 1
                try:
                    with modes[0], _SwitchesKept(), switched(autocasts):
                        return make_fx(partial(mapped, **kwargs))(*args)
                finally:
                    depth -= 1

            with ThreadPoolExecutor(1) as outside:  # a thread begins without the modes of export
                program = outside.submit(follow).result()
            with switched(()):  # its casts are among its operators
                return program(*args)

        return call

    with ExitStack() as stack:
        for owner in (torch, torch.func):
            stack.enter_context(replaced(owner, "vmap", vmap))
        yield


def whole_of(tensor: Tensor) -> Tensor:
    """Of all elements, where a tensor is that of one in a function that is mapped."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
