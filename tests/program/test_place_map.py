"""Lines: what is known of the long row from the short one is what the long row has."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

import pytest
from torch import fx

from autopar.program.place_map import PlaceMap
from autopar.program.segments import Segment
from autopar.strategies.node_info import BlockPlace, info

SHOWN = 3  # blocks before and after the one that stands for others
Label = tuple[int, int, int]  # piece, block, and node of the block


class Rows:
    """Single nodes, then equal blocks, then single nodes and so on; all of it, and a few blocks."""

    def __init__(self, random: Random, rows: int) -> None:
        graph, self.long, self.short = fx.Graph(), list[Label](), list[fx.Node]()
        self.labels, self.periods = list[Label](), dict[int, int]()  # of the short row; by piece
        for piece in range(2 * rows + 1):
            period = self.periods[piece] = random.randint(1, 3)
            count = 1 if piece % 2 == 0 else random.randint(2 * SHOWN + 2, 12)
            segment = Segment(fx.Graph(), count)
            self.long += [(piece, block, at) for block in range(count) for at in range(period)]
            repeated = count - 2 * SHOWN if count > 1 else 1
            for block in range(count - repeated + 1):
                stands_for = repeated if block == SHOWN else 1
                number = block + repeated - 1 if block > SHOWN else block
                for at in range(period):
                    node = graph.placeholder(f"n{piece}_{block}_{at}")
                    info(node).block = BlockPlace(segment, node.name, number, stands_for)
                    self.short.append(node)
                    self.labels.append((piece, number, at))
        self.place_map = PlaceMap.of(self.short)

    def alike(self, labels: list[Label]) -> list[tuple[int, int]]:
        """Return what equal blocks have in common."""
        return [(piece, at) for piece, _, at in labels]


CASES = [(seed, rows) for seed in range(4) for rows in (0, 1, 2, 3)]


@pytest.mark.parametrize(("seed", "rows"), CASES)
def test_places_are_those_of_equal_nodes(seed: int, rows: int) -> None:
    made = Rows(Random(seed), rows)
    line = made.place_map
    assert line.count == len(made.long)
    assert len(line.shown) == len(made.long) + 1
    assert line.shown[-1] == len(made.short)
    shown = [made.labels[place] for place in line.shown[:-1]]
    assert made.alike(shown) == made.alike(made.long)
    moved = [(p, b + later, at) for (p, b, at), later in zip(shown, line.later.tolist())]
    assert moved == made.long
    assert line.repeat_values(made.labels) == shown
    for place in range(len(made.short)):
        assert [*line.places(place)] == [at for at in range(line.count) if line.shown[at] == place]


@pytest.mark.parametrize(("seed", "rows"), CASES)
def test_stages_are_written_out_as_they_are(seed: int, rows: int) -> None:
    """Each run of a stage stands for as many blocks as it has there, between blocks like it."""
    made = Rows(Random(seed), rows)
    line = made.place_map
    starts = range(0, line.count, 1 + line.count // 20)
    for start, end in ((a, b) for a in starts for b in [*starts, line.count] if a < b):
        first, last, counts = line.stage(start, end)
        labels, at = list[Label](), first
        for run, count in zip(line.runs, counts, strict=True):
            if count > 1:
                assert first < run.shown  # a part of the block before, at least
                assert run.shown + 2 * run.period <= last
                labels += made.labels[at : run.shown]
                labels += made.labels[run.shown : run.shown + run.period] * count
                at = run.shown + run.period
        assert made.alike(labels + made.labels[at:last]) == made.alike(made.long[start:end])


@pytest.mark.parametrize(("seed", "rows"), [case for case in CASES if case[1]])
def test_what_is_read_elsewhere_is_read_as_in_all_blocks(seed: int, rows: int) -> None:
    random = Random(seed)
    made = Rows(random, rows)
    line, place = made.place_map, {label: at for at, label in enumerate(made.long)}
    short = {label: at for at, label in enumerate(made.labels)}
    for run, piece in zip(line.runs, range(1, 2 * rows, 2)):
        period = made.periods[piece]
        blocks = sum(label[0] == piece for label in made.long) // period
        maker, reader = random.randrange(period), random.randrange(period)
        block = made.labels[run.shown][1]
        # Read by the next block, in each of them.
        there = short[piece, block, maker], short[piece, block + run.count, reader]
        wanted = [
            (place[piece, at, maker], place[piece, at + 1, reader])
            for at in range(block, block + run.count)
        ]
        assert line.spans(*there) == wanted
        assert line.readers(there) == wanted
        # Made before, and read by all.
        read = [short[label] for label in made.labels if label[0] == piece and label[2] == reader]
        every = [place[piece, at, reader] for at in range(blocks)]
        assert line.readers(read) == [tuple(every)]
        # Made before, and read by one that stands for itself.
        first = short[piece, block - 1, reader]
        assert line.spans(0, first) == [(0, place[piece, block - 1, reader])]


def test_runs_follow_one_another() -> None:
    line = Rows(Random(0), 3).place_map
    ends = accumulate(run.more for run in line.runs)
    moved = [run.first - run.shown for run in line.runs]
    assert moved == [0, *ends][:-1]
    assert all(run.shown < after.shown for run, after in pairwise(line.runs))
