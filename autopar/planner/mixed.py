"""Mixed: a program of which some regions run again in backward, so that it fits."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.candidates.candidate import Candidate
from autopar.cost.footprint import CONSTANT_KINDS
from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.mixed_problem import Mix, members_of, mixed_problem
from autopar.planner.recomputation import KINDS, PLAIN, Regions
from autopar.planner.whole import Whole

ATTEMPTS = 4  # at what is so lean that it fits
_SLACK = 1e-6  # relative


def mixed(
    laid: Candidate,
    regions: Regions,
    memory: float,
    dropped: list[Candidate],
    whole: Whole | None,
    fastest: float,
    go_on: Callable[[], None],
) -> Candidate | None:
    """The same layouts, with the regions recomputed that make them fit at least cost. The leanest
    of what does not fit is `dropped`. `whole`: of the program that `laid` stands for, if it does.
    What is sure to take `fastest` is none. `go_on` may raise, before each long part."""
    plain = laid.recomputed(regions.all(PLAIN))
    held = plain.held
    there = sum(getattr(held, kind) for kind in (*CONSTANT_KINDS, "gradients", "gathered"))
    left, host = _left(plain, memory)
    room = left + plain.memory.activations  # for what is kept for backward
    if there - plain.passing_copies(0) > memory or room < 0:
        # whatever runs again
        dropped.append(laid.recomputed(regions.all(KINDS[-1])))
        return None
    ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
    graphs = {}
    for kind, way in ways.items():
        go_on()
        graphs[kind] = way.rewritten
    members = members_of(laid.captured, regions.free)
    if members is None:
        raise NotAlike  # a region is in part in the block that stands for others
    go_on()
    problem = mixed_problem(graphs, members, laid.prices, plain.repeats)
    mix = problem.solve(room, host)
    if whole is not None and mix is not None and mix.own is None and _may_win(plain, mix, fastest):
        # Before a program is made of it: there is more beside what is kept where some runs again.
        used = {kind.kind for kind in mix.kinds}
        every = (way for kind, way in ways.items() if kind.kind in used)
        room = min(room, max(_left(way, memory)[0] + way.memory.activations for way in every))
        mix = problem.solve(room, host)
    for _ in range(ATTEMPTS):
        if mix is None:
            break
        if not _may_win(plain, mix, fastest):
            return None
        go_on()
        if mix.own is not None:
            mixed = laid.recomputed(regions.fixed | mix.own)
        else:
            assert whole is not None, "this program cannot say it"
            mixed = whole.mixed(laid, mix)
        if mixed.fits(memory):
            return mixed
        last = mix
        over, there = (max(0.0, -left) for left in _left(mixed, memory))
        while mix is not None and mix.kinds == last.kinds:
            room, over = room - over, 2 * over
            host, there = host - there, 2 * there
            mix = problem.solve(room, host)
    # The problem adds up what is kept, which is not all there is at the peak.
    alike = [way for way in ways.values() if way.fits(memory)]
    if not alike:
        dropped.append(ways[KINDS[-1]])
    return min(alike, key=lambda way: way.seconds, default=None)


def _left(way: Candidate, memory: float) -> tuple[float, float]:
    """The bytes that a way leaves of the device, and of the host if that is another; below 0, so
    many are missing."""
    left = memory - way.needed(memory)
    is_shared = way.cluster.device.host.is_device
    host = way.fullest_host.room
    return (min(left, host), math.inf) if is_shared else (left, host)


def _may_win(plain: Candidate, mix: Mix, fastest: float) -> bool:
    return plain.seconds + plain.microbatches * mix.seconds < fastest * (1 + _SLACK)
