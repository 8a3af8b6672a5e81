"""Size guards: at which other sizes of its inputs a captured program is the same.

    guards = size_guards(captured, {0: ((1, 0), None)}, size=10)
    guards(12)             # whether forward and torch decide everything as at 10

Forward runs once more, on fake tensors of which one size is a symbol. What Python or torch asks of
that size is noted: `if x.size(1) > 64`, or how much `x[:, :64]` leaves. Another size goes the same
way where all answers are the same. Where forward asks for values, or counts in ways that are no
sums and products of sizes, nothing is proven.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar._torch.symbolic_sizes import LEAST, SymbolicRun
from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.capture.fake import computing, fake_model, outside_fake_mode


@dataclass(frozen=True)
class Affine:
    """A number that follows a size: `(times * size + plus) / divisor`."""

    times: int
    plus: int
    divisor: int = 1

    def __call__(self, size: int) -> int:
        return (self.times * size + self.plus) // self.divisor

    def fits(self, size: int) -> bool:
        """Return whether the number is a whole one."""
        return (self.times * size + self.plus) % self.divisor == 0

    @classmethod
    def through(cls, sizes: Sequence[int], numbers: Sequence[int]) -> Affine | None:
        """Return the form that gives these numbers at these sizes, of which two at least differ."""
        (first, *_, last), (start, *_, end) = sizes, numbers
        slope = Fraction(end - start, last - first)
        plus = start - slope * first
        divisor = math.lcm(slope.denominator, plus.denominator)
        form = cls(int(slope * divisor), int(plus * divisor), divisor)
        pairs = zip(sizes, numbers)
        return form if all(form.fits(size) and form(size) == n for size, n in pairs) else None


# Of each dim of a flat input how its size follows; None: it does not vary.
SizeForms = Mapping[int, tuple[Affine | None, ...]]


def size_guards(captured: Captured, forms: SizeForms, size: int) -> Callable[[int], bool] | None:
    """Return whether the program is the same at another size; None where nothing is proven.

    `forms`: by number of the flat input. `size`: that of the call which was captured."""
    if size < LEAST or captured.decisions:
        return None
    example, device = captured.example, captured.example.device
    run = SymbolicRun(size)
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    try:
        with outside_fake_mode(), torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fake_model(example.model, run.mode, device)
            inputs = [
                _input(run, leaf, forms.get(at, ()), device) if isinstance(leaf, Tensor) else leaf
                for at, leaf in enumerate(leaves)
            ]
            if example.precision is not None:
                model, inputs = computing(model, inputs, run.mode, example.precision)
            args, kwargs = pytree.tree_unflatten(inputs, spec)
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices=[]),
                switched(example.autocasts),
                run,
            ):
                model(*args, **kwargs)
    except Exception:  # forward does what a symbol is not good for: nothing is proven then
        return None
    return run.guards() if run.is_proven else None


def _input(
    run: SymbolicRun, like: Tensor, forms: tuple[Affine | None, ...], device: torch.device
) -> Any:
    shape = [
        size if form is None else run.of(form.times, form.plus)
        for size, form in zip(like.shape, forms or (None,) * like.ndim)
    ]
    return run.tensor(like, shape, device)
