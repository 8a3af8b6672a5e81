"""Token slices: how long the slices of a sequence are that follow one another through a pipeline.

>>> token_slices([[3.0, 5.0, 7.0], [3.0, 5.0], [3.0]], stages=4)  # a slice of l takes 1 + 2 l
TokenSlices(lengths=(1, 1, 1), seconds=18.0)

Stage k works on a slice when it has done the slices before, and stage k - 1 this one. So K stages
take T = sum of all t + (K - 1) times the largest t. The dynamic programme of TeraPipe (Li et al.
2021) finds the shortest T: for each largest time, the shortest sum of times that are at most that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InvalidInput
from autopar.pipeline.schedules.registry import positive

_AT_ONCE = 256  # largest times that are tried together


@dataclass(frozen=True)
class TokenSlices:
    """Describe the slices of a sequence, in order, and the time that all stages take for them."""

    lengths: tuple[int, ...]
    seconds: float


def token_slices(
    times: Sequence[Sequence[float]], stages: int, *, sequences: int = 1
) -> TokenSlices:
    """Return the slices for which a pipeline of `stages` takes the shortest time, forward or back.

    `sequences` that are sliced alike follow one another: they take the sums of all.

    `times[c][l - 1]` is the time of a stage for a slice of l units behind c others, so that row c
    has one number for each length that is left. A unit is a token, or a fixed number of tokens.
    """
    positive("token slices", "stages", stages)
    positive("token slices", "sequences", sequences)
    table = _read(times)
    # No slices take less than the shortest sum of times and the largest among them.
    least = sequences * float(_sums(table, np.array([np.inf]))[0, -1])
    best = TokenSlices((), np.inf)
    limits = np.unique(table[np.isfinite(table)])
    for first in range(0, len(limits), _AT_ONCE):
        tried = limits[first : first + _AT_ONCE]
        tried = tried[least + (stages - 1) * tried < best.seconds]
        if not len(tried):
            break
        sums = _sums(table, tried)
        totals = sequences * sums[:, -1] + (stages - 1) * tried
        at = int(totals.argmin())
        if totals[at] < best.seconds:
            best = TokenSlices(_lengths(table, sums[at], tried[at]), float(totals[at]))
    return best


def _read(times: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return times by where a slice begins and ends; infinite for those that do not exist."""
    count = len(times)
    if not count or [len(row) for row in times] != list(range(count, 0, -1)):
        raise InvalidInput(
            "times of token slices: row c has one for each length that is left behind c units",
            got=f"rows of {', '.join(str(len(row)) for row in times) or 'nothing'}",
            remedy="[[t(1, 0), t(2, 0)], [t(1, 1)]] for a sequence of 2 units",
        )
    table = np.full((count, count + 1), np.inf)
    for begin, row in enumerate(times):
        table[begin, begin + 1 :] = row
    seconds = table[np.triu_indices(count, 1, count + 1)]
    if not (np.isfinite(seconds) & (seconds >= 0)).all():
        raise InvalidInput(
            "times of token slices are finite and not negative",
            got=f"{seconds.min()} to {seconds.max()}",
            remedy="give times of at least 0",
        )
    return table


def _sums(table: NDArray[np.float64], limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, by limit and end, the shortest sum of times of slices that end there, each of them
    within the limit."""
    sums = np.full((len(limits), len(table) + 1), np.inf)
    sums[:, 0] = 0.0
    for end in range(1, len(table) + 1):
        last = table[:end, end]
        allowed = np.where(last <= limits[:, None], last, np.inf)
        sums[:, end] = (sums[:, :end] + allowed).min(axis=1)
    return sums


def _lengths(
    table: NDArray[np.float64], sums: NDArray[np.float64], limit: float
) -> tuple[int, ...]:
    """Return the lengths of the slices of a shortest sum, from its end."""
    lengths, end = list[int](), len(table)
    while end:
        last = table[:end, end]
        begin = int((sums[:end] + np.where(last <= limit, last, np.inf)).argmin())
        lengths.append(end - begin)
        end = begin
    return tuple(reversed(lengths))
