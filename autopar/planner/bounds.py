"""Lower bounds: what every way to run a step takes, whatever its layouts are.

    bounds = Bounds(captured, request, regions)
    bounds.seconds(question)     # no answer to it takes less; infinite: none fits
    bounds.note(question, 0.1)   # its layouts alone take so long, as their search has proved

Each bound is derived where it is computed. `seconds` adds those that may be added:

- compute: each operator is cut over all ranks of a stage at best, and stages share the work evenly;
- waiting: the shortest time of the schedule, however work is spread over stages (`least_time`);
- traffic: what a search for layouts on the same mesh has proved, which holds for smaller
  micro-batches, too, and less what cut states may hide;
- memory: what forward keeps is cut over all ranks at best; what does not fit runs again, or goes to
  the host, the cheapest first. Where not even that is enough, nothing fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import combinations
from typing import NamedTuple

from torch import fx

from autopar.candidates.recomputation import Regions
from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.capture.origins import is_of_parameters, state_bytes
from autopar.capture.regions import runs
from autopar.cluster import Cluster, Device
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.footprint import unsharded_bytes
from autopar.cost.operator_costs import facts_of
from autopar.cost.saved_tensors import SavedTensors, saved_values
from autopar.cost.unsharded_work import (
    UnshardedWork,
    runs_each_microbatch,
    spread_seconds,
    unsharded_work,
)
from autopar.cost.value_storage import source
from autopar.mesh import Mesh
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.compute_lower_bound import least_time
from autopar.planner.question import Question
from autopar.recompute import FULL, PLAIN, Recompute
from autopar.states import BUFFER_BYTES, States
from autopar.strategies.node_info import info
from autopar.strategies.registry import tensor_inputs
from autopar.strategies.rule import Facts

CHEAPEST = States.of("zero1")  # of states that are cut: the others move no less
_MOST_WAITING = 1  # of a micro-batch on all stages: seldom does a schedule have to wait longer
_SLACK = 1e-6  # relative, of a solver that rounds


class MemorySaving(NamedTuple):
    """Bytes that some regions need not keep, and the least seconds that it takes to do without."""

    bytes_: float
    seconds: float


class Bounds:
    """Lower bounds of the seconds and bytes of all ways to run one program."""

    def __init__(self, captured: Captured, request: Request, regions: Regions) -> None:
        self._captured, self._request, self._regions = captured, request, regions
        self._cluster = request.cluster
        self._device = self._cluster.strongest(range(self._cluster.devices))
        # Of what was asked for by name nothing is left to choose.
        self._is_free = len(regions.kinds) > 1 and not regions.fixed
        self._proved: dict[tuple[int, Mesh], dict[int, float]] = {}
        self.run, self.again, self.kept = cache(self._run), cache(self._again), cache(self._kept)
        self._least_time, self._saved = cache(least_time), cache(self._saved_by_states)

    def seconds(
        self, question: Question, schedule: Schedule | None = None, to_beat: float = 0.0
    ) -> float:
        """Return the seconds that a step takes at least; infinity if none fits. `schedule`: the
        actions of the question's schedule, if they were listed. Its waiting is only looked at where
        that is likely to matter for `to_beat` seconds."""
        stages, parts = question.stages, question.microbatches
        inner = question.meshes[0].size
        pieces, is_staged = parts * inner, question.schedule is not None
        if not self.fits(question, schedule):
            return math.inf
        times = parts / stages  # a rank runs its share of each micro-batch
        again = self.least_again(question, schedule)
        once = self.run(pieces, is_staged=is_staged) + again
        least = max(times * once, self._traffic(question) + times * again)
        may_wait = once * (parts / stages + _MOST_WAITING) >= to_beat
        if schedule is not None and schedule.batch_parts == parts and may_wait:
            least = max(least, self._least_time(schedule) * once)
        return least + (self.update if question.states.is_on_host else 0.0)

    def note(self, question: Question, seconds: float) -> None:
        """Keep what the search for layouts has proved: on each of the question's meshes no step
        with whole states and nothing recomputed takes less."""
        for mesh in question.meshes:
            known = self._proved.setdefault((question.stages, mesh), {})
            known[question.microbatches] = max(seconds, known.get(question.microbatches, 0.0))

    def _traffic(self, question: Question) -> float:
        """Return the least that is known of layouts: smaller micro-batches take no less in all."""
        least = math.inf
        if question.states.buffer_bytes != BUFFER_BYTES:
            return 0.0
        for mesh in question.meshes:
            known = self._proved.get((question.stages, mesh), {}).items()
            fewer = (s for count, s in known if question.microbatches % count == 0)
            least = min(least, max(fewer, default=0.0))
        if question.states.is_cut and least and self._request.states is None:
            least -= max(self._saved(mesh) for mesh in question.meshes) / question.stages
        return max(0.0, least)

    def fits(self, question: Question, schedule: Schedule | None = None) -> bool:
        """Return whether some layouts may fit: each tensor cut over all ranks of a stage."""
        limit, inner = self._request.roomiest, question.meshes[0].size
        if not self._is_free or limit == math.inf:
            return True
        kind = question.recompute if isinstance(question.recompute, Recompute) else FULL
        states = 0.0 if question.states.is_on_host else self.states
        if kind.kind == "full" or kind.keep == "host":
            return states / inner / question.stages <= limit
        size = self.kept(kind) / question.microbatches / inner
        if schedule is None or not size:
            return (size + states / inner) / question.stages <= limit
        return size * most_held(schedule, not kind.is_plain, states / inner / size) <= limit

    def least_again(self, question: Question, schedule: Schedule | None = None) -> float:
        """Return the seconds that one micro-batch takes more, at least, on all stages together."""
        kind, pieces = question.recompute, question.microbatches * question.meshes[0].size
        if isinstance(kind, Recompute):
            return self.again(pieces, kind)
        if question.schedule is None:
            missing = self.kept(PLAIN) / question.microbatches - self.left(
                question.states.is_on_host
            )
            return self._least_for(missing * question.microbatches, pieces)
        return 0.0

    def left(self, is_hosted: bool) -> float:
        """Return the bytes that all ranks have together, besides what they keep between steps."""
        limit = self._request.roomiest * self._cluster.devices
        return limit - (0.0 if is_hosted else self.states)

    def _least_for(self, missing: float, pieces: int) -> float:
        """Return the least seconds for a micro-batch that `missing` bytes are not kept. Bytes are
        spared one by one, the cheapest first: no choice of whole regions takes less."""
        if missing <= 0 or not self._is_free:
            return 0.0
        seconds = 0.0
        for saving in sorted(self._savings(pieces), key=lambda s: s.seconds / s.bytes_):
            share = min(1.0, missing / saving.bytes_)
            seconds, missing = seconds + share * saving.seconds, missing - share * saving.bytes_
            if missing <= 0:
                break
        return seconds * (1 - _SLACK)

    def _savings(self, pieces: int) -> Iterable[MemorySaving]:
        """Return what regions spare if they run again, or if a host keeps it, whichever is less."""
        host, exposed = self._device.host, 2 * (1 - self._device.overlap)
        for region in self._region_works:
            cheap_seconds = self.seconds_of(region.cheap_work, pieces)
            dear_seconds = max(0.0, self.seconds_of(region.work, pieces) - cheap_seconds)
            for size, again in ((region.cheap, cheap_seconds), (region.dear, dear_seconds)):
                moved = math.inf if host.is_device else exposed * host.copied(size / pieces, 0)
                if size:
                    yield MemorySaving(size, min(again, moved))

    @cached_property
    def update(self) -> float:
        """Return the seconds by which a step is longer, at least, where hosts update all that
        learns: each device's host a part that is no larger than the others'."""
        nodes = self._captured.graph.find_nodes(op="placeholder")
        learned = [n for n in nodes if n.name in self._captured.parameters and info(n).learns]
        moved = sum(info(n).val.numel() * state_bytes(n).updated * info(n).count for n in learned)
        speeds = 1 / self._device.host.bandwidth - 1 / self._cluster.device.throughput
        return max(0.0, moved / self._cluster.devices * speeds)

    @cached_property
    def states(self) -> float:
        """Return the bytes that all ranks keep together of parameters, from step to step."""
        states = self._request.states
        if states is not None and states.is_on_host:
            return 0.0
        sizes = unsharded_bytes(self._captured)
        return sum(sizes.values()) - sizes["gradients"]  # which come when the rest has gone

    def _run(self, pieces: int, *, is_staged: bool = False) -> float:
        """Return the seconds, forward and backward, of one run on a part of each operator's work:
        on the fastest devices, where stages may be large on these."""
        device = self._device if is_staged else self._cluster.device
        return sum(spread_seconds(self._work, pieces, device))

    def average_run(self, pieces: int) -> float:
        """Return the seconds of one run where each device has as much of the work as it is fast."""
        kinds = Counter[Device]()
        for node, used in zip(self._cluster.nodes, self._cluster.used_of_nodes):
            kinds[node.device] += used
        seconds = {kind: sum(spread_seconds(self._work, pieces, kind)) for kind in kinds}
        if not all(seconds.values()):
            return 0.0
        return self._cluster.devices / sum(n / seconds[kind] for kind, n in kinds.items())

    def _again(self, pieces: int, kind: Recompute) -> float:
        """Return the seconds of what runs again of a micro-batch if all regions are treated so."""
        if kind.kind is None or not self._is_free:
            return 0.0
        return self.seconds_of(self._rerun_works[kind.kind == "full"], pieces)

    @cached_property
    def _rerun_works(self) -> tuple[UnshardedWork, UnshardedWork]:
        """Return the work of all regions that is cheap to run again, and all of it."""
        regions, program = self._region_works, self._captured
        calls = [[n for r in regions for n in r.cheap_calls], [n for r in regions for n in r.calls]]
        return unsharded_work(program, calls[0]), unsharded_work(program, calls[1])

    def seconds_of(self, work: UnshardedWork, pieces: int) -> float:
        """Return the seconds of a forward of some work, cut into `pieces`, on the best device."""
        return spread_seconds(work, pieces, self._device)[0]

    def _kept(self, kind: Recompute) -> float:
        """Return the bytes that all ranks keep together of a step, at least."""
        if kind.kind == "full":
            return 0.0
        dropped = self._cheap if kind.kind else set[fx.Node]()
        return float(sum(size for (node, _), size in self._values.items() if node not in dropped))

    def _saved_by_states(self, mesh: Mesh) -> float:
        """Return the seconds that cut states save at most, with any layouts on a mesh."""
        return most_saved(self._captured, self._cluster, [mesh])

    @cached_property
    def _work(self) -> UnshardedWork:
        nodes = filter(runs_each_microbatch, self._captured.operators)
        return unsharded_work(self._captured, nodes)

    @cached_property
    def _values(self) -> dict[tuple[fx.Node, int], int]:
        return saved_values(self._captured)

    @cached_property
    def _region_calls(self) -> list[list[fx.Node]]:
        of_parameters = partial(is_of_parameters, captured=self._captured)
        return [nodes for _, nodes in runs(self._captured.graph, self._regions.free, of_parameters)]

    @cached_property
    def _facts(self) -> dict[str, Facts | None]:
        rules = ((node, self._captured.priced[node.name]) for node in self._captured.operators)
        return {n.name: facts_of(n, rule, tensor_inputs(n)) for n, rule in rules if rule}

    @cached_property
    def _cheap(self) -> set[fx.Node]:
        """Return the calls that may run again where regions keep only what is dear to make: cheap
        ones, made of what is there. `passes/recompute_marks.py` decides so, given layouts."""
        saved = {node for node, _ in saved_values(self._captured, at_most=True)}
        cheap = set[fx.Node]()
        for node in (node for nodes in self._region_calls for node in nodes):
            known, sources = self._facts.get(node.name), map(source, node.all_input_nodes)
            has_inputs = all(n.op == "placeholder" or n in saved or n in cheap for n in sources)
            if has_inputs and known and known.is_cheap and not known.is_view:
                cheap.add(node)
        return cheap

    @cached_property
    def _region_works(self) -> list[_Region]:
        """Return the regions; what one keeps is free if nothing in it has to run again."""
        kept_bytes, saved = Counter[fx.Node](), SavedTensors(self._facts, {}, {})
        for (node, _), size in self._values.items():
            kept_bytes[node] += size
        regions = []
        for nodes in self._region_calls:
            names = saved.remade(nodes)
            again = [n for n in nodes if n.name in names and runs_each_microbatch(n)]
            cheap_again = [n for n in again if n in self._cheap and kept_bytes[n]]
            dear = float(sum(kept_bytes[n] for n in nodes if n not in self._cheap))
            cheap = float(sum(kept_bytes[n] for n in nodes if n in self._cheap))
            work, cheap_work = (unsharded_work(self._captured, n) for n in (again, cheap_again))
            regions.append(_Region(dear, cheap, work, cheap_work, again, cheap_again))
        return regions


class _Region(NamedTuple):
    """A region: calls that run again together, if they do."""

    dear: float  # bytes that it keeps of what is dear to make: all ranks together
    cheap: float  # of what is cheap
    work: UnshardedWork  # of all that then runs again
    cheap_work: UnshardedWork  # of what is cheap alone
    calls: Sequence[fx.Node]  # that run again
    cheap_calls: Sequence[fx.Node]


def most_saved(captured: Captured, cluster: Cluster, meshes: Sequence[Mesh]) -> float:
    """Return the seconds of a step that cut states save at most, with any layouts on any mesh.

    One all-reduce becomes two movements that together seldom take less, and forward hides some of
    the second. No parameter is larger than a whole one.
    """
    prices = [
        (price, axes)
        for mesh in meshes
        for price in [ClusterPrice(cluster, mesh, CHEAPEST.buffer_bytes)]
        for count in range(1, len(mesh.names) + 1)
        for axes in combinations(mesh.names, count)
    ]

    def saved(size: float) -> float:
        def of(price: ClusterPrice, axes: tuple[str, ...]) -> float:
            kinds = ("all_reduce", "reduce_scatter", "all_gather")
            once, first, second = (float(price.bucketed(axes, size, kind)) for kind in kinds)
            return max(0.0, once - first - second) + cluster.device.overlap * second

        return max((of(*way) for way in prices), default=0.0)

    sizes = Counter[int]()
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.name in captured.parameters and info(node).learns:
            held = max(state_bytes(node).copy, state_bytes(node).gradient)
            sizes[info(node).val.numel() * held] += info(node).count
    return sum(saved(float(size)) * count for size, count in sizes.items())


@lru_cache(1 << 9)
def most_held(schedule: Schedule, recompute: bool, states: float) -> float:
    """Return how often some rank holds at least what all stages keep of one micro-batch together,
    however they share it, and their `states`, which are so many times that."""
    from ortools.linear_solver import pywraplp  # as slow to load as all of autopar

    program = pywraplp.Solver.CreateSolver("GLOP")
    most = program.NumVar(0, program.infinity(), "")
    saved, stored = ([program.NumVar(0, 1, "") for _ in range(schedule.stages)] for _ in range(2))
    program.Add(sum(saved) == 1)
    program.Add(sum(stored) == 1)
    moments = (
        tuple((at, counts[0]) for at, counts in live.items())
        for live in peak_counts(schedule, recompute=recompute)
    )
    for held in dict.fromkeys(moments):
        share = states / schedule.pipes  # each pipe has a copy of a stage, or a part of it
        program.Add(most >= sum(count * saved[at] + share * stored[at] for at, count in held))
    program.Minimize(most)
    is_solved = program.Solve() == pywraplp.Solver.OPTIMAL
    return float(program.Objective().Value()) * (1 - _SLACK) if is_solved else 0.0
