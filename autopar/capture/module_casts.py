"""Module casts: `self.router = self.router.to(dtype)` in forward.

Where the module has that dtype, and is there, it stays what it is: the parameters of what is
followed are no place to write to. Another one would replace the parameters of the user's model in
its first run, which an optimizer does not learn of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller

_APPLY = "_apply"  # which all of to(), float(), cuda(), ... call


@contextmanager
def casts_change_nothing() -> Iterator[None]:
    """While forward runs, modules are cast to what they are, and to nothing else."""

    def apply(
        self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            made = change(tensor)
            if (made.dtype, made.device, made.shape) != (tensor.dtype, tensor.device, tensor.shape):
                raise InvalidInput(
                    "forward leaves the dtypes and devices of parameters and buffers as they are",
                    got=f"{name} of a {type(self).__name__}, from {tensor.dtype} on "
                    f"{tensor.device} to {made.dtype} on {made.device}",
                    remedy="cast the module before, or what it computes with (F.linear(x, "
                    "weight.to(dtype)))",
                    source=caller(),
                )
        return self

    with replaced(nn.Module, _APPLY, apply):
        yield
