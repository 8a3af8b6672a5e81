"""Times of token slices: what the price model says of a few, for slices of all lengths.

    costs = SliceCosts.of(candidate)
    costs.seconds(600, 424)       # of 600 tokens behind 424 others

t(l; c) = constant + linear l + prefix l (c + l / 2): operators that start, tokens, and the keys
that causal attention reads. The three numbers fit the prices of five programs of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from autopar.candidates.beside import carry_slice
from autopar.candidates.candidate import Candidate
from autopar.passes.token_cutter import cut_tokens, slice_lengths, token_count
from autopar.pipeline.token_slicing import TokenSlices, token_slices

MOST_UNITS = 64  # into which a sequence is divided, to find where slices begin


@dataclass(frozen=True)
class SliceCosts:
    """Predict the seconds of a slice on all stages, forward and backward."""

    tokens: int  # of a sequence
    whole: float  # seconds of one slice that is the sequence
    constant: float
    linear: float
    prefix: float

    @classmethod
    def of(cls, laid: Candidate) -> SliceCosts:
        """Return the costs of slices of a program that is in no stages."""
        tokens = token_count(laid.captured)
        half, rows, seconds = max(tokens // 2, 1), [], []
        firsts = [(max(tokens // count, 1), 0) for count in (2, 4, 8, 16)]
        for first, number in dict.fromkeys([*firsts, (half, 1)]):
            lengths = [n for n in (first, tokens - first) if n]
            if number < len(lengths):
                length, before = lengths[number], first * number
                rows.append([1.0, length, length * (before + length / 2)])
                seconds.append(_seconds(laid, lengths, number))
        # Slices of all lengths count alike.
        table, scale = np.array(rows) / np.array(seconds)[:, None], np.array(rows).max(axis=0)
        fitted, *_ = np.linalg.lstsq(table / scale, np.ones(len(rows)), rcond=None)
        whole = _seconds(laid, [tokens], 0)
        return cls(tokens, whole, *np.maximum(fitted / scale, 0.0).tolist())

    def seconds(self, length: int, before: int) -> float:
        """Return the time of a slice of `length` tokens behind `before` others."""
        if length == self.tokens:
            return self.whole
        return self.constant + self.linear * length + self.prefix * length * (before + length / 2)

    def shares(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Return the times of all slices, as parts of the time of the whole sequence."""
        starts = [0, *accumulate(lengths)]
        return tuple(self.seconds(n, at) / self.whole for n, at in zip(lengths, starts))

    def best(self, stages: int, sequences: int) -> TokenSlices:
        """Return the slices by which `sequences` pass `stages` fastest, whose ends are at
        multiples of a unit of tokens."""
        unit = -(-self.tokens // MOST_UNITS)
        ends = [*range(0, self.tokens, unit), self.tokens]
        # Each of the stages takes its part of a slice's time.
        times = [
            [self.seconds(end - start, start) / stages for end in ends if end > start]
            for start in ends[:-1]
        ]
        units = token_slices(times, stages, sequences=sequences)
        bounds = [ends[at] for at in accumulate(units.lengths, initial=0)]
        lengths = (end - start for start, end in pairwise(bounds))
        return TokenSlices(tuple(lengths), units.seconds)


def time_slices(laid: Candidate, slices: Sequence[int]) -> tuple[float, ...]:
    """Return the times of slices that are given in proportion, as parts of a sequence's time."""
    return SliceCosts.of(laid).shares(slice_lengths(laid.captured, slices)) if slices else ()


def _seconds(laid: Candidate, lengths: Sequence[int], number: int) -> float:
    run = carry_slice(laid, cut_tokens(laid.captured, lengths, number)).step.program.run
    worked, moved = run.worked, run.moved
    return worked.forward + worked.backward + moved.forward + moved.backward
