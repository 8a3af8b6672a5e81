"""Maps: what `torch.vmap` and `torch.func` make of a function is followed as its operators.

Export keeps the steps by which torch takes a dim away and gives it back, among them functions that
only count how deep they are: a graph of these cannot be changed. So a function that is mapped, or
differentiated, is followed on its own first, where torch has turned it into operators, and these
are the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch.autograd import function_transforms
from autopar.base.user_code import is_users_frame
from autopar.capture.autocasts import active, switched
from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import gradient_refused, in_another_thread, replaced


class _SwitchesKept(TorchFunctionMode):
    """Where gradients are switched on and off is a part of what is followed: on only where they are
    around all that is differentiated."""

    def __init__(self, follower: _Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tracing = get_proxy_mode() if function is torch._C._set_grad_enabled else None
        if tracing is not None:
            is_on = args[0] and all(self.follower.around_gradients)
            tracing.tracer.create_node("call_function", function, (is_on,), {})
        return function(*args, **(kwargs or {}))


# What they make of a function is a function.
_MAKERS = ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian")
_BEGIN = ("grad_increment_nesting", "jvp_increment_nesting")  # by which torch differentiates


@contextmanager
def maps_are_operators() -> Iterator[None]:
    """Within, a function that is mapped or differentiated is the operators that it comes to."""
    follower = _Follower()
    plain_jvp: Callable[..., Any] = torch.func.jvp

    def jvp(function: Any, primals: Any, tangents: Any, **how: Any) -> Any:
        made = partial(plain_jvp, function, **how)
        return follower.around(made)(primals, tangents) if _is_asked() else made(primals, tangents)

    with ExitStack() as stack:
        for name in _MAKERS:
            made = follower.instead(getattr(torch.func, name))
            for owner in (torch, torch.func) if name == "vmap" else (torch.func,):
                stack.enter_context(replaced(owner, name, made))
        stack.enter_context(replaced(torch.func, "jvp", jvp))
        for name in _BEGIN:
            stack.enter_context(replaced(function_transforms, name, follower.alone(name)))
        yield


def _is_asked() -> bool:
    """Whether the user's own code has called what calls this: torch's own, as in a mask of blocks,
    is written out by `mapped.py`."""
    return is_users_frame(sys._getframe(2))


class _Follower:
    """Follows functions of functions, one at a time: others in it are a part of it."""

    def __init__(self) -> None:
        self.depth = 0
        # Of gradients, one within another: whether others are on around each.
        self.around_gradients: list[bool] = []

    def instead(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Of what makes another function of a function."""

        def make(function: Callable[..., Any], *how: Any, **named: Any) -> Callable[..., Any]:
            made = plain(function, *how, **named)
            return wraps(function)(self.around(made)) if _is_asked() else made

        return make

    def around(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            modes = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
            if self.depth or not modes:
                return made(*args, **kwargs)
            autocasts, learns = active(), torch.is_grad_enabled()

            def follow() -> Any:
                self.depth += 1
                try:
                    torch.set_grad_enabled(learns)
                    with modes[0], _SwitchesKept(self), switched(autocasts):
                        return make_fx(partial(made, **kwargs))(*args)
                finally:
                    self.depth -= 1

            program = in_another_thread(follow)
            with switched(()):  # its casts are among its operators
                return program(*args)

        return call

    def alone(self, name: str) -> Callable[..., Any]:
        """What differentiates, refused but in what is followed."""
        plain = getattr(function_transforms, name)

        @contextmanager
        def begin(*args: Any) -> Iterator[Any]:
            if not self.depth:
                raise gradient_refused("a function of torch.func by another name, or vjp,")
            if name == _BEGIN[0]:
                self.around_gradients.append(torch.is_grad_enabled())
            try:
                with plain(*args) as level:
                    yield level
            finally:
                if name == _BEGIN[0]:
                    self.around_gradients.pop()

        return begin


def whole_of(tensor: Tensor) -> Tensor:
    """Of all elements, where a tensor is that of one in a function that is mapped."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
