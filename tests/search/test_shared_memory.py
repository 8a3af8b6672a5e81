"""Cuts into stages, also of ranks whose memory several share: each is the best of all cuts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.pipeline.stages.shared_memory import cut_together
from autopar.pipeline.stages.table import StageTable

PLACES, STAGES = 9, 4
# Moments on two ranks: all activations of some slices, what was received or waits of others.
CHIMERA = [
    {0: (2, 0, 0, 0, 0), 3: (1, 1, 1, 0, 0)},
    {0: (1, 0, 2, 0, 0), 3: (2, 1, 0, 0, 0)},
    {1: (3, 2, 0, 0, 0), 2: (1, 0, 1, 0, 0)},
]


Cut = tuple[int, ...]  # the places where stages start, and the end


def random_pieces(seed: int) -> StageTable:
    generator = random.Random(seed)
    layers = [
        (generator.random(), generator.choice([0, 0, 3, 9]), *generator.choices(range(5), k=2))
        for _ in range(PLACES)
    ]
    received = [generator.randrange(4) for _ in range(PLACES)] + [0]
    tables = np.zeros((4, PLACES + 1, PLACES + 1))
    for i, j in itertools.combinations(range(PLACES + 1), 2):
        tables[:, i, j] = np.sum(layers[i:j], axis=0)
    seconds = tables[0]
    states, kept, later = tables[1:].astype(np.int64)
    return StageTable(
        seconds, states == 0, np.array(received), states, kept, later, np.zeros_like(kept)
    )


def cuts() -> list[Cut]:
    inner = itertools.combinations(range(1, PLACES), STAGES - 1)
    return [(0, *ends, PLACES) for ends in inner]


def taken(pieces: StageTable, cut: Cut, moment: dict[int, tuple[int, int, int]]) -> int:
    return sum(
        pieces.states[cut[s], cut[s + 1]]
        + whole * pieces.kept[cut[s], cut[s + 1]]
        + received * pieces.received[cut[s]]
        + later * pieces.weight_halves[cut[s], cut[s + 1]]
        for s, (whole, received, later, *_) in moment.items()
    )


def worth(pieces: StageTable, cut: Cut) -> tuple[int, float, int]:
    spans = list(itertools.pairwise(cut))
    return (
        sum(pieces.empty[span] for span in spans),
        max(pieces.seconds[span] for span in spans),
        sum(pieces.received[start] for start, _ in spans),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_that_fits(seed: int) -> None:
    pieces = random_pieces(seed)
    every, offered = cuts(), pieces.offered(STAGES, {})
    most = sorted(max(taken(pieces, cut, moment) for moment in CHIMERA) for cut in every)
    for limit in (most[0] - 1, most[0], most[len(most) // 4], most[-1]):
        fitting = [c for c in every if all(taken(pieces, c, m) <= limit for m in CHIMERA)]
        starts = cut_together(pieces, offered, [limit] * len(CHIMERA), CHIMERA)
        assert (starts is None) == (not fitting)
        if starts is not None:
            found = (*starts, PLACES)
            assert found in fitting
            empty, slowest, _ = min(worth(pieces, cut) for cut in fitting)
            assert worth(pieces, found)[0] == empty
            assert worth(pieces, found)[1] == pytest.approx(slowest, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_without_shared_memory_the_cut_is_the_best(seed: int) -> None:
    pieces = random_pieces(seed)
    for fixed in ({}, {2: 5}, {1: 1, 3: 7}):
        every = [c for c in cuts() if all(c[stage] == place for stage, place in fixed.items())]
        starts = pieces.fastest(pieces.offered(STAGES, fixed))
        assert starts is not None
        assert worth(pieces, (*starts, PLACES)) == min(worth(pieces, cut) for cut in every)
    assert pieces.fastest(pieces.offered(STAGES, {1: 8})) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_least_sum_of_all_cuts_and_of_those_with_a_piece(seed: int) -> None:
    pieces = random_pieces(seed)
    weights = random.Random(seed).choices(range(4), k=STAGES)
    costs = [pieces.bytes(weight, 1, 1) for weight in weights]
    offered = pieces.offered(STAGES, {})
    offered[2][:, 7] = False

    def spans(cut: Cut) -> list[tuple[int, int]]:
        return list(itertools.pairwise(cut))

    def cost(cut: Cut) -> int:
        return sum(table[span] for table, span in zip(costs, spans(cut)))

    allowed = [c for c in cuts() if all(mask[span] for mask, span in zip(offered, spans(c)))]
    starts = pieces.least(offered, costs)
    assert starts is not None
    assert cost((*starts, PLACES)) == min(map(cost, allowed))
    for stage, table in enumerate(pieces.through(offered, costs)):
        for span in np.ndindex(table.shape):
            having = [cost(c) for c in allowed if spans(c)[stage] == span]
            assert table[span] == min(having, default=np.inf)
