"""Step loss: the number that a step returns. Its backward is done, and a second one is refused.

>>> pm.step(x).backward()
InvalidInput: a step has run backward already: its loss has no graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch.tensors import plain_attributes
from autopar.errors import InvalidInput

_BACKWARD = (torch.autograd.backward, torch.autograd.grad)
_KEEPS_CLASS = frozenset(
    ["add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "true_divide", "neg"]
)


class StepLoss(Tensor):
    """A number without a graph. Operators on it return plain tensors, except the sums and
    products that users form of losses before `backward()`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _BACKWARD:
            argument = args[0] if args else ()
            outputs = (argument,) if isinstance(argument, Tensor) else tuple(argument)
            if any(isinstance(output, cls) and not output.requires_grad for output in outputs):
                raise _has_no_graph(f"torch.autograd.{func.__name__}()")
        with plain_attributes():
            result = func(*args, **(kwargs or {}))
            is_loss = type(result) is Tensor and result.ndim == 0 and not result.requires_grad
            if is_loss and getattr(func, "__name__", "").strip("_") in _KEEPS_CLASS:
                return result.as_subclass(cls)
        return result

    @classmethod
    def of(cls, loss: Tensor) -> StepLoss:
        """Return a loss as a `StepLoss` of the same number."""
        return loss.as_subclass(cls)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refuse backward, unless a tensor with a graph was added in place."""
        if self.requires_grad:
            super().backward(*args, **kwargs)
            return
        raise _has_no_graph("backward()")

    @property
    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    # torch treats subclasses of Tensor differently in these.

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain)

    def __format__(self, how: str) -> str:
        return format(self._plain, how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self._plain.__deepcopy__(memo)


def _has_no_graph(operation: str) -> InvalidInput:
    return InvalidInput(
        "a step has run backward already: its loss has no graph",
        got=f"{operation} of the loss that step() returned",
        remedy="leave it out, and go on with optimizer.step(): gradients are in "
        "parameter.grad. step(..., scale=1/n) scales them",
    )
