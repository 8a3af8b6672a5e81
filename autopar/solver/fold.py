"""Repeated blocks, found by structure: nodes and edges that come again, `period` nodes later.

>>> from autopar.solver.cost_graph import CostGraph
>>> graph = CostGraph()
>>> cost, move = np.array([1.0, 2.0]), np.array([[0.0, 1.0], [1.0, 0.0]])
>>> nodes = [graph.add_node(cost) for _ in range(8)]
>>> for a, b in zip(nodes, nodes[1:]):
...     graph.add_edge(a, b, move)
>>> find_runs(graph.packed)
[BlockRun(start=1, period=1, count=7, crossing=(0,), inputs=(0,), shared=())]

Two nodes are alike when they have the same table and their edges to earlier nodes have the same
tables and lead equally far back, or to the very same node: one that all blocks share. The cut
between blocks is placed where the fewest strategies cross.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.solver.packed_graph import BlockRun, PackedGraph

LEAST_BLOCKS = 3
_MOST_EDGES = 24  # a node with more edges to earlier nodes is not part of a block
_GRAMS = (1, 2, 4, 8, 16)
_LAGS = 6  # candidates for the period, of each length of gram


def find_runs(packed: PackedGraph) -> list[BlockRun]:
    """Runs of repeated blocks that do not overlap, those that save most first."""
    rows = _EdgeRows(packed)
    found: list[BlockRun] = []
    segments = [(0, len(packed))]
    while segments:
        begin, end = segments.pop()
        run = _best_run(rows, begin, end, found)
        if run is not None:
            found.append(run)
            segments += [(begin, run.start), (run.end, end)]
    return found


class _EdgeRows:
    """For each node, its edges to earlier nodes in order: their tables and where they lead."""

    def __init__(self, packed: PackedGraph) -> None:
        self.packed = packed
        n = len(packed)
        degree = np.bincount(packed.high, minlength=n)
        self.regular = degree <= _MOST_EDGES
        width = int(degree[self.regular].max(initial=0))
        first = np.cumsum(degree) - degree
        rank = np.arange(len(packed.high)) - first[packed.high]
        used = self.regular[packed.high]
        at = packed.high[used], rank[used]
        self.low = np.full((n, width), -1)
        self.table = np.full((n, width), -1)
        self.back = np.zeros((n, width), int)
        self.low[at] = packed.low[used]
        self.table[at] = packed.edge_table[used]
        self.back[at] = packed.high[used] - packed.low[used]
        code = packed.node_table.copy()
        for column in range(width):
            pairs = code * (self.table.max(initial=0) + 2) + self.table[:, column] + 1
            code = np.unique(pairs, return_inverse=True)[1]
        self.code = code

    def lags(self, begin: int, end: int) -> list[int]:
        """Likely periods: how far apart equal stretches of the program stand."""
        inside = [row for row in self.packed.rows if begin <= row.start and row.end <= end]
        if inside:
            return [max(inside, key=lambda row: row.count * row.period).period]
        code, lags = self.code[begin:end], []
        gram, length = code, 1
        for wanted in _GRAMS:
            while length < wanted and len(gram) > length:
                pairs = gram[:-length] * len(self.code) + gram[length:]
                gram = np.unique(pairs, return_inverse=True)[1]
                length *= 2
            order = np.argsort(gram, kind="stable")
            same = gram[order][1:] == gram[order][:-1]
            counts = np.bincount(np.diff(order)[same])
            lags += [int(lag) for lag in np.argsort(-counts, kind="stable")[:_LAGS] if counts[lag]]
        return list(dict.fromkeys(lags))

    def alike(self, lag: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether node i is like node i + lag; which of its edges lead to the very same node."""
        near, far = slice(None, -lag), slice(lag, None)
        shared = (self.low[near] == self.low[far]) & (self.low[near] >= 0)
        edges = (self.table[near] == self.table[far]) & (
            shared | (self.back[near] == self.back[far])
        )
        alike = (
            (self.packed.node_table[near] == self.packed.node_table[far])
            & edges.all(axis=1)
            & self.regular[near]
            & self.regular[far]
        )
        changed = (shared[near] != shared[far]).any(axis=1) & alike[near]
        alike[lag:] &= ~changed  # an edge keeps its kind through all blocks
        return alike, shared


def _best_run(rows: _EdgeRows, begin: int, end: int, others: list[BlockRun]) -> BlockRun | None:
    drafts = []
    for lag in rows.lags(begin, end):
        alike, shared = rows.alike(lag)
        for start, stop in _stretches(alike[begin : end - lag]):
            draft = BlockRun(begin + start, lag, (stop - start) // lag + 1)
            if draft.count >= LEAST_BLOCKS:
                drafts.append((draft.saved, begin + stop + lag, draft, shared))
    best: BlockRun | None = None
    for saved, stop, draft, shared in sorted(drafts, key=lambda d: (-d[0], d[2].period)):
        if best is not None and best.saved >= saved:
            break
        run = _refined(rows.packed, draft, stop, shared)
        if run is None or any(_clash(run, other) or _clash(other, run) for other in others):
            continue
        if best is None or run.saved > best.saved:
            best = run
    return best


def _stretches(flags: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]


def _clash(run: BlockRun, other: BlockRun) -> bool:
    """Whether `run` shares a node that lies inside the blocks of `other`."""
    return any(other.start <= node < other.end for node in run.shared)


def _refined(
    packed: PackedGraph, draft: BlockRun, stop: int, shared: np.ndarray
) -> BlockRun | None:
    """Place the cut between blocks, then leave out blocks until the rest sees the run only
    through the last block's crossing nodes and through nodes that all blocks share."""
    edges = _StretchEdges(packed, draft, stop, shared)
    run = _placed(packed, edges, draft, stop)
    while run is not None and run.count >= LEAST_BLOCKS:
        smaller = _checked(packed, edges, run)
        if smaller == run:
            return run
        run = smaller
    return None


class _StretchEdges:
    """The edges inside a stretch that repeats: those to the previous blocks, those to nodes that
    all blocks share."""

    def __init__(self, packed: PackedGraph, draft: BlockRun, stop: int, shared: np.ndarray) -> None:
        ranks = np.arange(len(packed.high)) - np.searchsorted(packed.high, packed.high)
        inside = np.flatnonzero((packed.high >= draft.start + draft.period) & (packed.high < stop))
        high = packed.high[inside]
        common = shared[high - draft.period, ranks[inside]]
        self.low, self.high = packed.low[inside][~common], high[~common]
        self.shared_low, self.shared_high = packed.low[inside][common], high[common]


def _placed(
    packed: PackedGraph, edges: _StretchEdges, draft: BlockRun, stop: int
) -> BlockRun | None:
    """Begin the blocks where the fewest strategies cross from one to the next."""
    best: tuple[float, BlockRun] | None = None
    for period in (draft.period, 2 * draft.period):
        for start in range(draft.start, draft.start + period):
            count = (stop - start) // period
            if count < LEAST_BLOCKS:
                break
            cut = start + period
            lows = np.unique(edges.low[(edges.low < cut) & (edges.high >= cut)])
            if len(lows) and lows[0] < start:
                continue  # reaches further back than one block
            weight = float(np.log2(packed.sizes[lows]).sum())
            crossing = tuple(int(low) - start for low in lows)
            if best is None or weight < best[0]:
                best = weight, BlockRun(start, period, count, crossing)
        if best is not None:
            return best[1]
    return None


def _checked(packed: PackedGraph, edges: _StretchEdges, run: BlockRun) -> BlockRun:
    """The run itself with its neighbours filled in, or a shorter one to be checked again."""
    inside = (edges.shared_high >= run.start) & (edges.shared_high < run.end)
    shared = np.unique(edges.shared_low[inside])
    if len(shared) and shared[-1] >= run.start:
        dropped = (int(shared[-1]) - run.start) // run.period + 1
        return replace(
            run, start=run.start + dropped * run.period, count=run.count - dropped, inputs=()
        )
    leaving = (packed.low >= run.start) & (packed.low < run.end) & (packed.high >= run.end)
    low, high = packed.low[leaving], packed.high[leaving]
    block, position = np.divmod(low - run.start, run.period)
    kinds = np.stack([position, high, packed.edge_table[leaving]], axis=1)
    _, kind, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
    odd = counts[kind.ravel()] < run.count
    later = {int(node) for node in high[~odd]}
    before_last = np.unique(block[odd & (block < run.count - 1)])
    if len(before_last):
        # Keep the longest piece between the blocks that something later looks into.
        ends = [*(int(b) + 1 for b in before_last), run.count]
        pieces = list(zip([0, *ends], ends))
        first, last = max(pieces, key=lambda piece: piece[1] - piece[0])
        start = run.start + first * run.period
        return replace(run, start=start, count=last - first, inputs=(), shared=())
    if not set(position[odd].tolist()) <= set(run.crossing):
        return replace(run, count=run.count - 1, inputs=(), shared=())
    inputs = tuple(run.start - run.period + position for position in run.crossing)
    if min(inputs, default=0) < 0:
        return replace(run, start=run.start + run.period, count=run.count - 1)
    nodes = tuple(sorted({int(node) for node in shared} | later))
    return replace(run, inputs=inputs, shared=nodes)


def interface_entries(packed: PackedGraph, run: BlockRun) -> tuple[int, int]:
    """Entries of the shared nodes, and of the nodes that cross between blocks."""
    shared = math.prod(int(packed.sizes[node]) for node in run.shared)
    return shared, math.prod(int(packed.sizes[node]) for node in run.outputs)
