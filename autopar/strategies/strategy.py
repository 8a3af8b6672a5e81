"""Strategy: an operator's part in a plan, each axis of the mesh given to a factor or a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.base.schema import Index
from autopar.mesh import NamesElsewhere, axes_elsewhere


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
        """Return every axis that is given to a factor or a pass."""
        return tuple(a for _, axes in self.cuts for a in axes) + tuple(a for a, _ in self.passes)

    def renamed(self, names: NamesElsewhere) -> Strategy:
        """Return this strategy with other names of axes."""
        cuts = tuple((factor, axes_elsewhere(axes, names)) for factor, axes in self.cuts)
        passes = ((name, at) for axis, at in self.passes for name in axes_elsewhere([axis], names))
        return Strategy(cuts, tuple(sorted(passes)))

    def __str__(self) -> str:
        cuts = [f"{factor}@{'@'.join(axes)}" for factor, axes in self.cuts]
        passes = [f"pass {index}+{axis}" for axis, index in self.passes]
        return " ".join(cuts + passes) or "replicated"


Pieces = Sequence[tuple[int, int]]  # start and length of each member's


class InputWindow(NamedTuple):
    """The rows of the input that row y of the output reads.

    They are (y * steps + low) // parts to (y * steps + high) // parts.
    """

    steps: int
    parts: int
    low: int
    high: int

    def moved(self, before: Pieces, after: Pieces) -> int:
        """Return the most rows that one member sends, or gets.

        Members have the pieces `before` of the input, and compute the pieces `after`.
        """
        size = sum(length for _, length in before)
        sent, received = [0] * len(before), [0] * len(before)
        for reader, (row, count) in enumerate(after):
            if not count:
                continue
            first_row = (row * self.steps + self.low) // self.parts
            last = ((row + count - 1) * self.steps + self.high) // self.parts
            first_row, end = max(first_row, 0), min(max(last, first_row) + 1, size)
            for owner, (start, length) in enumerate(before):
                if owner != reader:
                    rows = max(min(end, start + length) - max(first_row, start), 0)
                    sent[owner] += rows
                    received[reader] += rows
        return max(sent + received)


class JointCut(NamedTuple):
    """An axis that cuts several tensors at once, each along a factor of its own.

    Ring attention cuts queries and keys. The kernel exchanges what members need of each other.
    """

    kernel: str
    inputs: tuple[str | None, ...]  # the factor that it cuts of each; None: whole
    outputs: tuple[str | None, ...]
    keeps: tuple[tuple[str, ...], ...] = ()  # tensors that its kernel keeps besides, by factors
    follows: bool = False  # propagation joins two cuts that meet, instead of gathering one
    travelling_rows: int | InputWindow | None = None  # of the first input and output; None: all

    @property
    def factors(self) -> tuple[str, ...]:
        named = (factor for factor in self.inputs + self.outputs if factor is not None)
        return tuple(dict.fromkeys(named))


TensorCut = tuple[str, int] | None  # a tensor's factor, and in how many parts its dim is cut


class PartsCut(NamedTuple):
    """The equal parts of dims, each cut by itself: an axis may be given to them as to a factor.

    A dim in one part is cut as a whole, and a tensor with `None` is not cut.
    """

    sizes: tuple[tuple[str, int], ...]  # the factors that it cuts, each with the number of parts
    inputs: tuple[TensorCut, ...]
    outputs: tuple[TensorCut, ...]

    @property
    def name(self) -> str | None:
        """Return the name for strategies, by the first tensor in parts; None if none has parts."""
        cuts = (cut for cut in (*self.inputs, *self.outputs) if cut is not None and cut[1] > 1)
        return next((f"{factor}/{number}" for factor, number in cuts), None)

    @property
    def factors(self) -> set[str]:
        return {factor for factor, _ in self.sizes}

    @staticmethod
    def axes_of(cut: TensorCut, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Return the axes that cut one tensor's factor, after the number of parts."""
        if cut is None:
            return {}
        factor, number = cut
        return {factor: (f"/{number}", *axes) if number > 1 else axes}
