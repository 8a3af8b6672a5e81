"""Room: what has to run again, or go to the host, so that a step fits, before any layout is there.

    room = Room(captured, request, regions)
    room.holds(plain, made, 8)   # whether a schedule may fit with 8 ranks a stage, nothing again
    room.again(512)              # seconds of a run on a 512th of the work, if all regions run again
    room.least_again(4, 512)     # of the same, what has to without a pipeline, in 4 micro-batches

What forward keeps for backward is cut over all ranks of a stage, at most. Stages may keep it in
whatever proportion: some rank still keeps as much as its schedule asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import is_of_parameters
from autopar.capture.regions import runs
from autopar.cluster import Device
from autopar.cost.footprint import unsharded_bytes
from autopar.cost.operator_costs import facts_of
from autopar.cost.saved_tensors import SavedTensors, saved_values, source
from autopar.cost.unsharded_work import (
    UnshardedWork,
    runs_each_microbatch,
    spread_seconds,
    unsharded_work,
)
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.schedule import Schedule
from autopar.planner.recomputation import FULL, PLAIN, Regions
from autopar.planner.request import Request
from autopar.recompute import Recompute
from autopar.strategies.registry import tensor_inputs
from autopar.strategies.rule import Facts

MOST_ACTIONS = 1 << 10  # stages times micro-batches of what is looked at
_SLACK = 1e-6  # relative, of a solver that rounds


@dataclass(frozen=True)
class _Region:
    """What runs again together, if it does."""

    dear: float  # bytes that it keeps of what is dear to make: all ranks together
    cheap: float  # of what is cheap
    work: UnshardedWork  # of all that then runs again
    some: UnshardedWork  # of what is cheap alone


class Room:
    """What recomputation a request needs, however the program is laid out."""

    def __init__(self, captured: Captured, request: Request, regions: Regions) -> None:
        self._captured, self._request, self._regions = captured, request, regions
        # Of what was asked for by name nothing is left to choose.
        self.is_free = len(regions.kinds) > 1 and not regions.fixed
        self.again, self.least_again = cache(self._again), cache(self._least_again)
        self.kept = cache(self._kept)

    @property
    def last(self) -> Recompute:
        """Of the ways to treat all regions alike the one that keeps least, but for that in which
        all of them run again."""
        return self._regions.kinds[-2 if self.is_free else -1]

    @property
    def staged(self) -> Sequence[Recompute]:
        """The ways to treat all regions of a pipeline alike, in the last of which all run again."""
        return self._regions.staged

    def holds(self, kind: Recompute, made: Schedule, inner: int, is_hosted: bool = False) -> bool:
        """Whether a schedule may fit on `inner` ranks in each stage, all regions treated so;
        `is_hosted`: with the states of parameters on the host."""
        limit = self._request.roomiest
        if not self.is_free or kind.kind == "full" or limit == math.inf:
            return True
        kept = self.kept(kind) / made.all_parts / inner
        states = 0.0 if is_hosted else self._states / inner
        if not kept or made.stages * made.all_parts > MOST_ACTIONS:
            return (kept + states) / made.stages <= limit
        return kept * most_held(made, not kind.is_plain, states / kept) <= limit

    def left(self, is_hosted: bool = False) -> float:
        """The bytes that all ranks have together, besides what they keep from step to step."""
        limit = self._request.roomiest * self._request.cluster.devices
        return limit - (0.0 if is_hosted else self._states)

    def _least_again(self, parts: int, pieces: int, is_hosted: bool = False) -> float:
        """Seconds that one of so many micro-batches takes more, each operator on one of so many
        pieces of its work, so that all fits where one is live at a time: what runs again, or goes
        to the host."""
        limit, devices = self._request.roomiest, self._request.cluster.devices
        if not self.is_free or limit == math.inf:
            return 0.0
        more = self.kept(PLAIN) / parts - self.left(is_hosted)
        if more <= 0:
            return 0.0
        host = 0.0 if self._device.host.is_device else self._device.host.memory * devices
        return least_seconds(tuple(self._offers(pieces)), more * parts, host * parts)

    def _offers(self, pieces: int) -> list[Offer]:
        """Of regions that are alike, what they spare and what that takes in a run on one of so many
        pieces."""
        host, shown = self._device.host, 2 * (1 - self._device.overlap)

        def copied(size: float) -> float:
            return shown * host.copied(size / pieces, 0)

        found = Counter[tuple[float, ...]]()
        for one in self._parts:
            some, every = self._seconds(one.some, pieces), self._seconds(one.work, pieces)
            more = max(0.0, every - some)
            found[one.cheap, one.dear, some, more, copied(one.cheap), copied(one.dear)] += 1
        return [Offer(count, *about) for about, count in found.items()]

    def _again(self, pieces: int, kind: Recompute = FULL) -> float:
        """Seconds of all that runs again if every region is treated so, each operator on one of so
        many pieces of its work."""
        if kind.kind is None:
            return 0.0
        works = (one.work if kind.kind == "full" else one.some for one in self._parts)
        return sum(self._seconds(work, pieces) for work in works)

    def _seconds(self, work: UnshardedWork, pieces: int) -> float:
        return spread_seconds(work, pieces, self._device)[0]

    @cached_property
    def _device(self) -> Device:
        """The strongest there is."""
        return self._request.cluster.strongest(range(self._request.cluster.devices))

    @cached_property
    def _states(self) -> float:
        """The bytes that all ranks keep together of parameters, from step to step."""
        asked = self._request.states
        if asked is not None and asked.is_on_host:
            return 0.0
        found = unsharded_bytes(self._captured)
        return sum(found.values()) - found["gradients"]  # which come when some of the rest has gone

    def _kept(self, kind: Recompute) -> float:
        """The bytes that all ranks keep together of a step, at least."""
        dropped = self._cheap if kind.kind else set[fx.Node]()
        return float(sum(size for (node, _), size in self._values.items() if node not in dropped))

    @cached_property
    def _values(self) -> dict[tuple[fx.Node, int], int]:
        return saved_values(self._captured)

    @cached_property
    def _runs(self) -> list[list[fx.Node]]:
        of_parameters = partial(is_of_parameters, captured=self._captured)
        return [nodes for _, nodes in runs(self._captured.graph, self._regions.free, of_parameters)]

    @cached_property
    def _facts(self) -> dict[str, Facts | None]:
        found = ((node, self._captured.priced[node.name]) for node in self._captured.operators)
        return {n.name: facts_of(n, rule, tensor_inputs(n)) for n, rule in found if rule}

    @cached_property
    def _cheap(self) -> set[fx.Node]:
        """What may be made again where regions keep no more than what is dear: what is cheap, and
        made of what is there. As `passes/recompute_marks.py` has it, of a program with layouts."""
        there = {node for node, _ in saved_values(self._captured, at_most=True)}
        found = set[fx.Node]()
        for node in (node for nodes in self._runs for node in nodes):
            known, sources = self._facts.get(node.name), map(source, node.all_input_nodes)
            is_there = all(n.op == "placeholder" or n in there or n in found for n in sources)
            if is_there and known and known.is_cheap and not known.is_view:
                found.add(node)
        return found

    @cached_property
    def _parts(self) -> list[_Region]:
        """The regions. Of one in which nothing has to run again what it keeps goes for nothing."""
        kept, saved = Counter[fx.Node](), SavedTensors(self._facts, {}, {})
        for (node, _), size in self._values.items():
            kept[node] += size
        found = []
        for nodes in self._runs:
            names = saved.remade(nodes)
            again = [n for n in nodes if n.name in names and runs_each_microbatch(n)]
            some = [n for n in again if n in self._cheap and kept[n]]
            dear = float(sum(kept[n] for n in nodes if n not in self._cheap))
            cheap = float(sum(kept[n] for n in nodes if n in self._cheap))
            work = [unsharded_work(self._captured, counted) for counted in (again, some)]
            found.append(_Region(dear, cheap, *work))
        return found


@dataclass(frozen=True)
class Offer:
    """Regions that are alike: the bytes that each spares of what is cheap and what is dear to make,
    and the seconds for that, if it runs again (with what is cheap), or goes to the host."""

    count: int
    cheap: float
    dear: float
    some: float
    more: float
    cheap_copied: float
    dear_copied: float


@lru_cache(1 << 9)
def least_seconds(offers: tuple[Offer, ...], bytes_: float, host: float) -> float:
    """It takes so many seconds at least to spare so many bytes, with so many on the host at most;
    if all together spare less, what it takes if everything runs again."""
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    if sum(one.count * (one.cheap + one.dear) for one in offers) < bytes_:
        return sum(one.count * (one.some + one.more) for one in offers)
    program = pywraplp.Solver.CreateSolver("GLOP")
    spared, taken, there = [], [], []
    scale = max(bytes_, 1.0)
    for one in offers:
        some, all_, cheap, dear = (program.NumVar(0, one.count, "") for _ in range(4))
        program.Add(all_ <= some)
        program.Add(some + cheap <= one.count)
        program.Add(all_ + dear <= one.count)
        if host:
            there += [cheap * (one.cheap / scale), dear * (one.dear / scale)]
            taken += [cheap * one.cheap_copied, dear * one.dear_copied]
        else:
            program.Add(cheap + dear <= 0)
        spared += [(some + cheap) * (one.cheap / scale), (all_ + dear) * (one.dear / scale)]
        taken += [some * one.some, all_ * one.more]
    program.Add(sum(spared) >= bytes_ / scale)
    if host:
        program.Add(sum(there) <= host / scale)
    program.Minimize(sum(taken))
    is_solved = program.Solve() == pywraplp.Solver.OPTIMAL
    return max(0.0, float(program.Objective().Value()) * (1 - _SLACK)) if is_solved else 0.0


@lru_cache(1 << 9)
def most_held(made: Schedule, recompute: bool, states: float) -> float:
    """Some rank holds at least so many times what all stages keep of one micro-batch together,
    however they share it, and their `states`, which are so many times that."""
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    program = pywraplp.Solver.CreateSolver("GLOP")
    most = program.NumVar(0, program.infinity(), "")
    kept, stored = ([program.NumVar(0, 1, "") for _ in range(made.stages)] for _ in range(2))
    program.Add(sum(kept) == 1)
    program.Add(sum(stored) == 1)
    moments = (
        tuple((at, counts[0]) for at, counts in live.items())
        for live in peak_counts(made, recompute=recompute)
    )
    for held in dict.fromkeys(moments):
        share = states / made.pipes  # each pipe has a copy of a stage, or a part of it
        program.Add(most >= sum(count * kept[at] + share * stored[at] for at, count in held))
    program.Minimize(most)
    is_solved = program.Solve() == pywraplp.Solver.OPTIMAL
    return float(program.Objective().Value()) * (1 - _SLACK) if is_solved else 0.0
