"""The private function with which torch computes the norm of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn


def check_total_norms(check: Callable[[list[Tensor]], None]) -> None:
    """Call `check` with the tensors of every total norm before torch computes it.

    Those of `clip_grad_norm_` are among them, and functions that were imported earlier check, too:
    they share the variable `func` of torch's wrapper (seen in torch 2.11 to 2.13).
    """
    wrapper: Any = nn.utils.get_total_norm
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    compute = cell.cell_contents

    @wraps(compute)
    def checked(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        check(tensors)
        return compute(tensors, *args, **kwargs)

    cell.cell_contents = checked
