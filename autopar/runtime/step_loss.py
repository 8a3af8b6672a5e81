"""StepLoss: what a step returns. Backward is done; who asks for it again is told what comes next.

>>> pm.step(x).backward()
InvalidInput: a step has run backward already: its loss has no graph
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from autopar._torch import plain_functions
from autopar.errors import InvalidInput

T = TypeVar("T")


class StepLoss(Tensor):
    """A number without a graph. Whatever is done to it gives plain tensors, but for the sums and
    products that people form of losses before `backward()`."""

    __torch_function__ = plain_functions  # type: ignore[assignment]

    @classmethod
    def of(cls, loss: Tensor) -> StepLoss:
        """The same number."""
        return loss.as_subclass(cls)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused, unless something with a graph was added in place."""
        if self.requires_grad:
            super().backward(*args, **kwargs)
            return
        raise InvalidInput(
            "a step has run backward already: its loss has no graph",
            got="backward() of the loss that step() returned",
            remedy="leave it out, and go on with optimizer.step(): gradients are in "
            "parameter.grad. step(..., scale=1/n) scales them",
        )

    @property
    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    # What torch does otherwise for tensors of another class than its own.

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain)

    def __format__(self, how: str) -> str:
        return format(self._plain, how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self._plain.__deepcopy__(memo)


def _still_told(operation: Callable[[Tensor, Any], Any]) -> Any:
    def calculate(self: StepLoss, other: Any) -> Any:
        result = operation(self, other)
        if isinstance(result, Tensor) and not result.requires_grad:
            return result.as_subclass(StepLoss) if result.ndim == 0 else result
        return result

    return calculate


for _name in ("__add__", "__radd__", "__mul__", "__rmul__", "__truediv__"):
    setattr(StepLoss, _name, _still_told(getattr(Tensor, _name)))
