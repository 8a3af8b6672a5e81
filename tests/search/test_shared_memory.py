"""Stages that share the memory of ranks: the solver's cut is the best of all cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.search.shared_memory import Piece, cut_together

PLACES, STAGES = 9, 4
# Moments on two ranks: all activations of some slices, what was received of others.
CHIMERA = [{0: (2, 0), 3: (1, 1)}, {0: (1, 0), 3: (2, 1)}, {1: (3, 2), 2: (1, 0)}]


def random_pieces(seed: int) -> dict[tuple[int, int], Piece]:
    generator = random.Random(seed)
    layers = [
        (generator.random(), generator.choice([0, 0, 3, 9]), generator.randrange(5))
        for _ in range(PLACES)
    ]
    crossing = [generator.randrange(4) for _ in range(PLACES)]
    found = {}
    for i, j in itertools.combinations(range(PLACES + 1), 2):
        seconds, states, kept = (sum(column) for column in zip(*layers[i:j]))
        found[i, j] = Piece(i, j, seconds, states == 0, crossing[i], states, kept)
    return found


def cuts(pieces: dict[tuple[int, int], Piece]) -> list[list[Piece]]:
    inner = itertools.combinations(range(1, PLACES), STAGES - 1)
    return [[pieces[pair] for pair in itertools.pairwise((0, *ends, PLACES))] for ends in inner]


def taken(cut: list[Piece], moment: dict[int, tuple[float, float]]) -> float:
    return sum(
        cut[s].states + n * cut[s].kept + sent * cut[s].received for s, (n, sent) in moment.items()
    )


def worth(cut: list[Piece]) -> tuple[int, float]:
    return sum(piece.is_empty for piece in cut), max(piece.seconds for piece in cut)


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_that_fits(seed: int) -> None:
    pieces = random_pieces(seed)
    every = cuts(pieces)
    most = sorted(max(taken(cut, moment) for moment in CHIMERA) for cut in every)
    offered = [
        [p for (i, j), p in pieces.items() if (i == 0) == (s == 0) and (j == PLACES) == (s == 3)]
        for s in range(STAGES)
    ]
    for limit in (most[0] - 1, most[0], most[len(most) // 4], most[-1]):
        fitting = [c for c in every if all(taken(c, moment) <= limit for moment in CHIMERA)]
        found = cut_together(offered, limit, CHIMERA)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found in fitting
            empty, slowest = min(map(worth, fitting))
            assert worth(found)[0] == empty
            assert worth(found)[1] == pytest.approx(slowest, rel=1e-6)
