"""Strategy: what an operator was told to do, each axis of the mesh given to something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.base.schema import Index


@dataclass(frozen=True)
class Strategy:
    """Every mesh axis given to a factor, to a partial sum that passes through, or to nothing."""

    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # factor -> its axes, outermost first
    passes: tuple[tuple[str, Index], ...] = ()  # axis -> index into Rule.passes

    @classmethod
    def of(
        cls, passes: Mapping[str, int] | None = None, /, **cuts: str | tuple[str, ...]
    ) -> Strategy:
        """Build from keyword arguments: `Strategy.of(b="dp", h=("tp", "sp"))`."""
        named = {f: (axes,) if isinstance(axes, str) else tuple(axes) for f, axes in cuts.items()}
        return cls(
            tuple(sorted((f, axes) for f, axes in named.items() if axes)),
            tuple(sorted((passes or {}).items())),
        )

    @property
    def by_factor(self) -> dict[str, tuple[str, ...]]:
        return dict(self.cuts)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that is given to something."""
        return tuple(a for _, axes in self.cuts for a in axes) + tuple(a for a, _ in self.passes)

    def __str__(self) -> str:
        cuts = [f"{factor}@{'@'.join(axes)}" for factor, axes in self.cuts]
        passes = [f"pass {index}+{axis}" for axis, index in self.passes]
        return " ".join(cuts + passes) or "replicated"


Pieces = Sequence[tuple[int, int]]  # start and length of each member's


class InputWindow(NamedTuple):
    """Which rows of the input row y of the output reads: from (y * steps + low) // parts to
    (y * steps + high) // parts."""

    steps: int
    parts: int
    low: int
    high: int

    def moved(self, before: Pieces, after: Pieces) -> int:
        """The most rows that a member sends to others, or gets: from pieces of the input to those
        of the output."""
        size = sum(length for _, length in before)
        sent, got = [0] * len(before), [0] * len(before)
        for reader, (row, count) in enumerate(after):
            if not count:
                continue
            first = (row * self.steps + self.low) // self.parts
            last = ((row + count - 1) * self.steps + self.high) // self.parts
            first, end = max(first, 0), min(max(last, first) + 1, size)
            for owner, (start, length) in enumerate(before):
                if owner != reader:
                    rows = max(min(end, start + length) - max(first, start), 0)
                    sent[owner] += rows
                    got[reader] += rows
        return max(sent + got)


class JointCut(NamedTuple):
    """One axis that cuts other factors of other tensors at once, as ring attention cuts queries and
    keys. Its kernel sees to what they need of each other."""

    kernel: str
    inputs: tuple[str | None, ...]  # of each the factor that it cuts; None: whole
    outputs: tuple[str | None, ...]
    keeps: tuple[tuple[str, ...], ...] = ()  # tensors that its kernel keeps besides, by factors
    follows: bool = False  # propagation makes it of cuts that meet, where it would gather one
    beside: int | InputWindow | None = (
        None  # of the first input (and output) only so many rows travel
    )

    @property
    def factors(self) -> tuple[str, ...]:
        named = (factor for factor in self.inputs + self.outputs if factor is not None)
        return tuple(dict.fromkeys(named))


TensorCut = tuple[str, int] | None  # of a tensor: a factor, and in how many parts its dim is cut


class PartsCut(NamedTuple):
    """What an axis may be given to besides a factor: the equal parts of dims, each cut by itself.

    A dim in one part is cut as a whole, and a tensor with `None` is not cut.
    """

    sizes: tuple[tuple[str, int], ...]  # the factors that it cuts, each with the number of parts
    inputs: tuple[TensorCut, ...]
    outputs: tuple[TensorCut, ...]

    @property
    def name(self) -> str | None:
        """What stands for it in strategies, by the first tensor in parts; `None` of no parts."""
        cuts = (cut for cut in (*self.inputs, *self.outputs) if cut is not None and cut[1] > 1)
        return next((f"{factor}/{number}" for factor, number in cuts), None)

    @property
    def factors(self) -> set[str]:
        return {factor for factor, _ in self.sizes}

    @staticmethod
    def axes_of(cut: TensorCut, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """The axes of the factor that is cut of one tensor, after the number of parts."""
        if cut is None:
            return {}
        factor, number = cut
        return {factor: (f"/{number}", *axes) if number > 1 else axes}
