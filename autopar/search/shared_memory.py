"""Stages that fill the memory of a rank together: their cut by CP-SAT.

Where a rank holds several stages (both directions of Chimera, chunks), how large one may be depends
on the others. Every stage takes one of the pieces between two places, each where the one before
ends, and at every moment what a rank keeps of its stages stays below the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

_RANGE = 1 << 24  # of the seconds of a stage in whole numbers
_TIES = 1 << 14  # of all that is sent, which decides between equals
_EFFORT = 30.0  # deterministic time, about seconds


@dataclass(frozen=True)
class Piece:
    """A stage that it would be possible to cut out, from one place to another."""

    start: int
    end: int
    seconds: float
    is_empty: bool  # holds no parameter
    received: int  # bytes
    states: int  # bytes
    kept: int  # bytes for one slice of the batch

    def bytes(self, whole: int, received: int) -> int:
        return self.states + whole * self.kept + received * self.received


def cut_together(
    pieces: Sequence[Sequence[Piece]],
    memory: float,
    moments: Sequence[Mapping[int, tuple[int, int]]],
) -> list[Piece] | None:
    """One of the `pieces` of each stage, with the slowest as fast as can be; None: none fit.

    A moment says by stage of how many slices a rank keeps all activations, and of how many what it
    received.
    """
    pieces = _possible(pieces, memory, moments)
    if not all(pieces):
        return None
    model = cp_model.CpModel()
    takes = [
        [model.new_bool_var(f"{s}:{p.start}-{p.end}") for p in row] for s, row in enumerate(pieces)
    ]
    every = [(piece, take) for row, bits in zip(pieces, takes) for piece, take in zip(row, bits)]
    scale = _RANGE / (max(piece.seconds for piece, _ in every) or 1.0)
    sent = _TIES / (sum(max((p.received for p in row), default=0) for row in pieces) or 1)
    slowest = model.new_int_var(0, _RANGE, "slowest")
    for row, bits in zip(pieces, takes):
        model.add_exactly_one(bits)
        model.add(slowest >= _sum(bits, [int(piece.seconds * scale) for piece in row]))
    for (row, bits), (after, others) in zip(zip(pieces, takes), zip(pieces[1:], takes[1:])):
        for place in {piece.end for piece in row} | {piece.start for piece in after}:
            ending = [bit for piece, bit in zip(row, bits) if piece.end == place]
            starting = [bit for piece, bit in zip(after, others) if piece.start == place]
            model.add(sum(ending) == sum(starting))
    for moment in moments:
        used = [
            (take, piece.bytes(*keeps))
            for stage, keeps in moment.items()
            for piece, take in zip(pieces[stage], takes[stage])
        ]
        model.add(_sum([take for take, _ in used], [size for _, size in used]) <= int(memory))
    costs = [_RANGE * _TIES * piece.is_empty + int(piece.received * sent) for piece, _ in every]
    model.minimize(_sum([slowest, *(take for _, take in every)], [_TIES, *costs]))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # deterministic
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = _EFFORT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [
        next(piece for piece, take in zip(row, bits) if solver.boolean_value(take))
        for row, bits in zip(pieces, takes)
    ]


def _possible(
    pieces: Sequence[Sequence[Piece]],
    memory: float,
    moments: Sequence[Mapping[int, tuple[int, int]]],
) -> list[list[Piece]]:
    """The pieces that fit beside the smallest ones of the other stages."""
    left = [list(row) for row in pieces]
    for moment in moments:
        least = {
            stage: min((piece.bytes(*keeps) for piece in pieces[stage]), default=0)
            for stage, keeps in moment.items()
        }
        for stage, keeps in moment.items():
            room = memory - sum(least.values()) + least[stage]
            left[stage] = [piece for piece in left[stage] if piece.bytes(*keeps) <= room]
    return left


def _sum(variables: Sequence[cp_model.IntVar], weights: Sequence[int]) -> cp_model.LinearExprT:
    return cp_model.LinearExpr.weighted_sum(variables, weights)
