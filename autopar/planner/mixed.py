"""Mixed recomputation: some regions of a program run again in backward, so that it fits."""

from __future__ import annotations

from autopar.candidates.candidate import Candidate
from autopar.candidates.mixed_problem import RecomputeAssignment, members_of, mixed_problem
from autopar.candidates.recomputation import KINDS, Regions
from autopar.candidates.whole import Whole
from autopar.cost.footprint import CONSTANT_KINDS
from autopar.planner.question import Answer, Found, TooLarge, TooSlow
from autopar.recompute import PLAIN
from autopar.text.progress import Report

ATTEMPTS = 4  # at what is so lean that it fits
_SLACK = 1e-6  # relative


def mixed(
    laid: Candidate,
    regions: Regions,
    memory: float,
    whole: Whole | None,
    cutoff: float,
    report: Report,
) -> Answer:
    """Return the fastest way with the layouts of `laid` in which enough regions run again to fit.
    `whole`: of the program that `laid` stands for, if it does. `report` may end the search."""
    plain = laid.recomputed(regions.all(PLAIN))
    if plain.fits(memory):
        return Found(plain) if plain.seconds < cutoff else TooSlow(plain.seconds)
    leanest = laid.recomputed(regions.all(KINDS[-1]))
    held = plain.held
    constant = sum(getattr(held, kind) for kind in (*CONSTANT_KINDS, "gradients", "gathered"))
    left, host = _left(plain, memory)
    room = left + plain.memory.activations  # for what is kept for backward
    if constant - plain.passing_copies(0) > memory or room < 0:
        return TooLarge(leanest.needed(memory), leanest)
    ways = {kind: laid.recomputed(regions.all(kind)) for kind in KINDS}
    members = members_of(laid.captured, regions.free)
    assert members is not None, "regions are in one block each, or the program is not folded"
    graphs = {}
    for kind, way in ways.items():
        report("memory", f"regions recomputed ({kind})")
        graphs[kind] = way.rewritten
    problem = mixed_problem(graphs, members, laid.prices, plain.equal_blocks)
    mix = problem.solve(room, host)
    needs_program = mix is not None and mix.for_short_program is None
    if whole is not None and mix and needs_program and _may_win(plain, mix, cutoff):
        # Before a program is made of it: there is more beside what is kept where some runs again.
        used = {kind.kind for kind in mix.kinds}
        every = (way for kind, way in ways.items() if kind.kind in used)
        room = min(room, max(_left(way, memory)[0] + way.memory.activations for way in every))
        mix = problem.solve(room, host)
    for _ in range(ATTEMPTS):
        if mix is None:
            break
        if not _may_win(plain, mix, cutoff):
            return TooSlow(plain.seconds + plain.microbatches * mix.seconds)
        report("memory", "recomputing regions")
        if mix.for_short_program is not None:
            way = laid.recomputed(regions.fixed | mix.for_short_program)
        else:
            assert whole is not None, "this program cannot say it"
            way = whole.mixed(laid, mix)
        if way.fits(memory):
            return Found(way)
        last = mix
        over, host_over = (max(0.0, -left) for left in _left(way, memory))
        while mix is not None and mix.kinds == last.kinds:
            room, over = room - over, 2 * over
            host, host_over = host - host_over, 2 * host_over
            mix = problem.solve(room, host)
    # The problem adds up what is kept, which is not all there is at the peak.
    alike = [way for way in ways.values() if way.fits(memory)]
    if not alike:
        return TooLarge(leanest.needed(memory), leanest)
    fastest = min(alike, key=lambda way: way.seconds)
    return Found(fastest) if fastest.seconds < cutoff else TooSlow(fastest.seconds)


def _left(way: Candidate, memory: float) -> tuple[float, float]:
    """Return the bytes that a way leaves of the device, and of the host if that is another; below
    0, so many are missing."""
    left = memory - way.needed(memory)
    is_shared = way.cluster.device.host.is_device
    host = way.fullest_host.room
    return (min(left, host), float("inf")) if is_shared else (left, host)


def _may_win(plain: Candidate, mix: RecomputeAssignment, cutoff: float) -> bool:
    return plain.seconds + plain.microbatches * mix.seconds < cutoff * (1 + _SLACK)
