"""Find the best strategy of every node of a cost graph, with a bound that proves it.

>>> graph = CostGraph()
>>> a, b = graph.add_node([3.0, 1.0], memory=[1, 8]), graph.add_node([0.0, 0.5], memory=[1, 1])
>>> graph.add_edge(a, b, [[0.0, 9.0], [9.0, 0.0]])
>>> free, tight = solve(graph), solve(graph, memory=4)
>>> (free.choice, free.objective, free.gap), (tight.choice, tight.objective, tight.memory)
(([1, 1], 1.5, 0.0), ([0, 0], 3.0, 2.0))
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from autopar.errors import Interrupted, InvalidInput
from autopar.solver.branch_and_bound import branch_and_bound
from autopar.solver.cost_graph import CostGraph
from autopar.solver.cp_sat_residual import relative_gap
from autopar.solver.dominated import prune
from autopar.solver.lagrangian import LagrangianSearch
from autopar.solver.optimum import SECONDS, Optimiser
from autopar.solver.packed_graph import Integers, PackedGraph
from autopar.text.progress import Report

TOLERANCE = 0.01  # the gap at which a search under a memory limit may stop
MOST_PREPARED = 4  # graphs that are remembered, to be solved for another limit
_ROUNDED = 1e-9  # relative
_PREPARED: dict[tuple[PackedGraph, bool], tuple[Optimiser, ProblemSizes]] = {}


@dataclass(frozen=True)
class ProblemSizes:
    """Count what there was to decide, and what was left of it after each phase."""

    nodes: int = 0
    strategies: int = 0  # of all nodes together
    entries: int = 0  # of all nodes and edges together
    pruned_strategies: int = 0
    pruned_entries: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)  # (blocks, nodes of a block)
    folded_nodes: int = 0  # nodes that are looked at once
    core_nodes: int = 0  # nodes that elimination alone could not do with

    def to_json(self) -> dict[str, object]:
        """Return the counts by name."""
        return asdict(self)


@dataclass(frozen=True)
class Solution:
    """Hold strategy `choice[i]` for node i. No choice (that fits) costs less than `bound`."""

    choice: list[int]
    objective: float  # seconds
    memory: float  # bytes
    bound: float
    seconds: float  # of the search itself
    sizes: ProblemSizes
    multiplier: float = 0.0  # under a memory limit: seconds that one more byte would save
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """Return by which part of the objective the solution may exceed the optimum."""
        return relative_gap(self.objective, self.bound)


def solve(
    graph: CostGraph,
    memory: float | None = None,
    report: Report = lambda phase, detail: None,
    *,
    tolerance: float = TOLERANCE,
    cutoff: float = np.inf,
    multiplier: float = 0.0,
    seconds: float = SECONDS,
) -> Solution:
    """Return the cheapest choice of strategies, of those that need at most `memory` bytes.

    `tolerance` is the gap at which a search under a memory limit may stop; without a limit (or with
    tolerance 0) the answer is exact as far as a fixed amount of work allows: `gap` tells. It also
    stops when no choice can cost less than `cutoff`; `multiplier` is a guess at the solution's own.
    It ends after `seconds` of this process, with the best so far and its gap; later if nothing that
    fits was found by then."""
    start, deadline = time.perf_counter(), time.process_time() + seconds
    limit = np.inf if memory is None else float(memory)
    search: LagrangianSearch | None = None
    interrupted = False
    try:
        optimiser, sizes = _prepared(graph.packed, report, is_limited=limit < np.inf)
        optimiser.core = 0  # of this solution, not of those before
        search = LagrangianSearch(
            optimiser.packed,
            limit,
            optimiser,
            tolerance,
            lambda detail: report("memory", detail),
            deadline,
            patience=SECONDS,
        )
        report("eliminate", f"{sizes.folded_nodes} of {sizes.nodes} nodes")
        branch_and_bound(search, cutoff, multiplier)
        sizes = replace(sizes, core_nodes=optimiser.core)
    except KeyboardInterrupt:
        if search is None or search.choice is None:
            raise Interrupted(
                "the search runs until it has found a plan",
                got="an interrupt before the first one was found",
                remedy="let it run longer",
            ) from None
        interrupted = True
    assert search.choice is not None
    if not np.isfinite(search.value):
        if search.is_late():
            raise InvalidInput(
                "a search has time to find one choice that its neighbours' strategies allow",
                got=f"none in {seconds:g} s",
                remedy="give it more time",
            )
        raise InvalidInput(
            "every node needs a strategy that its neighbours' strategies allow",
            got="a graph in which each choice has an infinite cost",
            remedy="allow more strategies, or give redistribution between them a finite cost",
        )
    taken = time.perf_counter() - start
    packed_choice = search.packed.translated(search.choice, graph.packed)
    choice, value, needed = graph.packed.alike(packed_choice, limit), search.value, search.memory
    if choice is not packed_choice:
        value, needed = graph.packed.evaluate(choice)
        if not np.isfinite(value):
            raise InvalidInput(
                "a block that stands for several has one strategy for each node in all of them",
                got="a graph in which every such choice has an infinite cost",
                remedy="give the whole graph",
            )
    report("done", f"{value:.6g} s in {taken:.3f} s")
    return Solution(
        choice=graph.packed.original(choice).tolist(),
        objective=value,
        memory=needed,
        bound=min(search.bound, value),
        seconds=taken,
        sizes=sizes,
        multiplier=search.multiplier,
        interrupted=interrupted,
    )


def least_memory(graph: CostGraph) -> tuple[float, list[int]]:
    """Return the least bytes that any choice of strategies needs, and a choice that needs them."""
    packed = graph.packed
    choice: Integers = packed.alike(Optimiser(packed).minimise(np.inf).choice, -np.inf)
    return packed.evaluate(choice)[1], packed.original(choice).tolist()


def least_limit(graph: CostGraph) -> float:
    """Return the lowest limit in bytes that is met, whatever is rounded on the way."""
    return least_memory(graph)[0] * (1 + _ROUNDED)


def _prepared(
    packed: PackedGraph, report: Report, *, is_limited: bool
) -> tuple[Optimiser, ProblemSizes]:
    """Prune and fold, and count what that left: once for all limits.
    Where elimination is all there is to do, pruning takes longer and is left out. A graph that was
    solved without a limit is known."""
    is_limited &= (packed, False) not in _PREPARED
    if (packed, is_limited) not in _PREPARED:
        problem = f"{packed.sizes.sum():,} strategies of {len(packed):,} nodes"
        optimiser = None
        if not is_limited:
            report("fold", problem)
            optimiser = Optimiser(packed)
        if optimiser is None or optimiser.is_tangled():
            report("prune", problem)
            pruned = prune(packed)
            report("fold", f"{pruned.sizes.sum():,} strategies left")
            optimiser = Optimiser(pruned)
        pruned_graph, runs = optimiser.packed, [chain.run for chain in optimiser.chains]
        sizes = ProblemSizes(
            nodes=len(packed),
            strategies=int(packed.sizes.sum()),
            entries=packed.strategy_pairs,
            pruned_strategies=int(pruned_graph.sizes.sum()),
            pruned_entries=pruned_graph.strategy_pairs,
            runs=[(run.count, run.period) for run in runs],
            folded_nodes=len(pruned_graph) - sum(run.saved for run in runs),
        )
        while len(_PREPARED) >= MOST_PREPARED:
            del _PREPARED[next(iter(_PREPARED))]
        _PREPARED[packed, is_limited] = optimiser, sizes
    return _PREPARED[packed, is_limited]
