"""Verification: the plain model, its captured program and the parallel one, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.text.tables import first_lines
from autopar.text.units import counted
from autopar.verification.references import Comparison, Difference

_SUMMED = "  the model has no loss: a weighted sum of its outputs is differentiated"
_DRAWS = "  the model draws random numbers: the plain one is given those that the program draws"
_LISTED = 12  # tensors that differ, of each program


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: use `ok`, `print(verification)` or `to_json()`."""

    mesh: Mesh  # of all ranks
    how: str  # the pipeline's schedule, and the micro-batches
    dtype: torch.dtype  # in which the programs ran
    tolerance: float  # of what no number of a coarser dtype reaches
    steps: int
    captured: tuple[Comparison, ...]  # with the plain model
    parallel: tuple[Comparison, ...]  # with the plain model
    differences: tuple[Difference, ...]  # the first values that differ, where something does
    sizes: tuple[str, ...] = ()  # of inputs that vary: those that were run, and which were not
    has_loss: bool = True  # the model's own; else a sum of its outputs is differentiated
    draws: bool = False  # the model draws random numbers, and the plain one was given the program's

    @property
    def ok(self) -> bool:
        """Return whether all three programs give equal results."""
        return all(row.ok for row in self._rows)

    @property
    def differs(self) -> bool:
        """Return whether a result differs by more than rounding explains; if not ok otherwise, it
        is `unverified`."""
        return any(row.differs for row in self._rows)

    @property
    def unverified(self) -> tuple[str, ...]:
        """Return the results that differ, but by no more than their coarse numbers may."""
        rows = (row for row in self._rows if not row.ok and not row.differs)
        return tuple(dict.fromkeys(f"{row.kind} {row.name}" for row in rows))

    def with_sizes(self, other: Verification, name: str) -> Verification:
        """Return this with the results of `other`, at inputs of other sizes, called `name`."""
        captured, parallel = (
            tuple(replace(row, name=f"{row.name} at {name}") for row in rows)
            for rows in (other.captured, other.parallel)
        )
        return replace(
            self,
            captured=self.captured + captured,
            parallel=self.parallel + parallel,
            differences=self.differences + other.differences,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "unverified": self.unverified,
            **vars(self),
            "mesh": self.mesh.sizes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "captured": [row.to_json() for row in self.captured],
            "parallel": [row.to_json() for row in self.parallel],
            "differences": [asdict(difference) for difference in self.differences],
        }

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        widest = max((row.allowed for row in self._rows), default=0.0)
        wide = f", up to {widest:.0e} after coarser numbers" if widest > self.tolerance else ""
        lines = [
            f"plain, captured and parallel are {self._verdict()}",
            f"  {self.mesh}{self.how}; {counted(self.steps, 'step')} in {kind}, "
            f"tolerance {self.tolerance:.0e}{wide}",
            *([f"  sizes of inputs: {'; '.join(self.sizes)}"] if self.sizes else []),
            *([] if self.has_loss else [_SUMMED]),
            *([_DRAWS] if self.draws else []),
            f"  {'':<24}{self._in_first_column('plain')}{'captured':>14}{'parallel':>14}",
            *self._losses(),
            *self._kinds(),
        ]
        captured = {(row.kind, row.name) for row in self.captured if not row.ok}
        for name, rows, known in (
            ("captured", self.captured, set()),
            ("parallel", self.parallel, captured),  # what is wrong there already is said there
        ):
            wrong = [row for row in rows if not row.ok and (row.kind, row.name) not in known]
            if wrong:
                lines.append(f"{name}, beside the plain model:")
                lines += first_lines([f"  {row}" for row in wrong], _LISTED, "; to_json() has all")
        return "\n".join([*lines, *map(str, self.differences)])

    def _verdict(self) -> str:
        if self.differs:
            return "NOT the same program"
        count = len(self.unverified)
        unknown = f", but for {count} results that cannot be verified" if count else ""
        return f"the same program{unknown}"

    @property
    def _rows(self) -> Sequence[Comparison]:
        return *self.captured, *self.parallel

    def _in_first_column(self, text: str) -> str:
        """Return a heading or an entry of the column of the plain model."""
        if not self.draws:
            return f"{text:>14}"
        return f"{text + ', same draws' if text == 'plain' else text:>20}"

    def _losses(self) -> Iterator[str]:
        captured = [row for row in self.captured if row.kind == "loss"]
        parallel = [row for row in self.parallel if row.kind == "loss"]
        for captured_row, parallel_row in zip(captured, parallel):
            plain, *others_shown = (
                "none" if n is None else f"{n:.8g}"
                for n in (captured_row.expected, captured_row.found, parallel_row.found)
            )
            shown = self._in_first_column(plain) + "".join(f"{n:>14}" for n in others_shown)
            what = "loss" if self.has_loss else "weighted sum"
            yield f"  {f'{what} of step {captured_row.name}':<24}{shown}"

    def _kinds(self) -> Iterator[str]:
        """Yield the largest error of each kind of tensor."""
        for kind in ("output", "gradient", "buffer", "state at the end"):
            both = self.captured, self.parallel
            columns = [[row for row in rows if row.kind == kind] for rows in both]
            if columns[0]:
                count = f"{len(columns[0])} tensors"
                shown = "".join(f"{_worst(rows):>14}" for rows in columns)
                yield f"  {f'{kind}, error':<24}{self._in_first_column(count)}{shown}"


def _worst(rows: Sequence[Comparison]) -> str:
    error = max((row.error for row in rows), default=0.0)
    return "missing" if math.isinf(error) else f"{error:.1e}" if error else "0"
