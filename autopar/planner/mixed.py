"""Mixed: a program of which some regions run again in backward, so that it fits."""

from __future__ import annotations

from autopar.planner.candidate import Candidate
from autopar.planner.recomputation import KINDS, PLAIN, Regions, mixed_problem

ATTEMPTS = 4  # at what is so lean that it fits


def mixed(
    laid: Candidate, regions: Regions, memory: float, dropped: list[Candidate]
) -> Candidate | None:
    """The same layouts, with the regions recomputed that make them fit at least cost. The leanest
    of what does not fit is `dropped`."""
    ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
    graphs = {kind: way.rewritten for kind, way in ways.items()}
    problem = mixed_problem(graphs, regions.free, laid.prices)
    plain = ways[PLAIN].memory
    room = memory - (plain.peak - plain.activations)
    for _ in range(ATTEMPTS):
        kinds = problem.solve(room)
        if kinds is None:
            break
        decided = regions.fixed | {n: how for n, how in kinds.items() if not how.is_plain}
        mixed = laid.recomputed(decided)
        if mixed.memory.peak <= memory:
            return mixed
        room -= mixed.memory.peak - memory
    # The problem adds up what is kept, which is not all there is at the peak.
    alike = [way for way in ways.values() if way.memory.peak <= memory]
    if not alike:
        dropped.append(ways[KINDS[-1]])
    return min(alike, key=lambda way: way.seconds, default=None)
