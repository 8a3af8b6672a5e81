"""Mixed: a program of which some regions run again in backward, so that it fits."""

from __future__ import annotations

import math

from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.candidate import Candidate
from autopar.planner.mixed_problem import members_of, mixed_problem
from autopar.planner.recomputation import KINDS, PLAIN, Regions
from autopar.planner.whole import Whole

ATTEMPTS = 4  # at what is so lean that it fits
_SLACK = 1e-6  # relative


def mixed(
    laid: Candidate,
    regions: Regions,
    memory: float,
    dropped: list[Candidate],
    whole: Whole | None = None,
    fastest: float = math.inf,
) -> Candidate | None:
    """The same layouts, with the regions recomputed that make them fit at least cost. The leanest
    of what does not fit is `dropped`. `whole`: where `laid` stands for a longer program, makes that
    one in these layouts, and says its regions: it is what is mixed if only it can be so. What is
    sure to take `fastest` is none."""
    ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
    graphs = {kind: way.rewritten for kind, way in ways.items()}
    members, plain = members_of(laid.captured, regions.free), ways[PLAIN]
    if members is None:
        raise NotAlike  # a region is in part in the block that stands for others
    problem = mixed_problem(graphs, members, laid.prices, plain.repeats)
    room = memory - (plain.memory.peak - plain.memory.activations)
    source = None
    for _ in range(ATTEMPTS):
        mix = problem.solve(room)
        if mix is None:
            break
        if laid.seconds + laid.microbatches * mix.seconds >= fastest * (1 + _SLACK):
            return None
        if mix.own is not None:
            mixed = laid.recomputed(regions.fixed | mix.own)
        else:
            assert whole is not None, "this program cannot say it"
            source, others = source or whole.of(laid), whole.regions
            mixed = source.recomputed(others.fixed | mix.of(others.free))
        if mixed.memory.peak <= memory:
            return mixed
        room -= mixed.memory.peak - memory
    # The problem adds up what is kept, which is not all there is at the peak.
    alike = [way for way in ways.values() if way.memory.peak <= memory]
    if not alike:
        dropped.append(ways[KINDS[-1]])
    return min(alike, key=lambda way: way.seconds, default=None)
