"""Search report: what a search for layouts found, how good it is, and what else it weighed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.mesh import Mesh
from autopar.solver.cp_sat_residual import relative_gap
from autopar.solver.solve import ProblemSizes

_SHARED = 0.01  # relative: what movements save at most by sharing steps


@dataclass(frozen=True)
class ConsideredMesh:
    """Record one mesh that was weighed, and why it was not taken."""

    mesh: Mesh
    # Predicted for a step or, where it says why it was not taken, that it takes at least.
    seconds: float | None
    memory: float | None
    why: str = ""  # why it was not solved or not taken


@dataclass(frozen=True)
class SearchReport:
    """Report a search: its time, its result with a bound, its size, and what it weighed."""

    seconds: float
    objective: float  # predicted seconds of a step
    added_up: float  # the same, as the search adds them up of the layouts that it found
    # No plan that fits takes less, on any mesh that was tried, with states that are whole, or cut
    # in any way, as those of the plan are, and of which no less runs again. 0: not known.
    bound: float
    gap: float
    sizes: ProblemSizes
    considered: tuple[ConsideredMesh, ...] = ()
    interrupted: bool = False  # the best so far; what was not weighed may be better
    multiplier: float = 0.0  # under a memory limit: seconds that one more byte would save

    def cut_short(self, bound: float = 0.0) -> SearchReport:
        """Return the report of a search that left out plans, which may take only `bound`."""
        return replace(self.made(self.objective, bound), interrupted=True)

    def taken(self, seconds: float) -> SearchReport:
        """Return the report for a plan that takes other `seconds` than the search added up.
        Movements that share steps make it faster; other plans may gain as much, and if that is more
        than a little, nothing is known of them."""
        gain = max(0.0, self.objective - seconds)
        bound = max(0.0, self.bound - gain) if gain <= _SHARED * seconds else 0.0
        gap = relative_gap(seconds, bound)
        return replace(self, objective=seconds, bound=bound, gap=gap)

    def lowered(self, bound: float) -> SearchReport:
        """Return the report with a lower bound that other plans may reach."""
        return self.made(self.objective, max(0.0, min(self.bound, bound)))

    def made(self, objective: float, bound: float) -> SearchReport:
        """Return the report for a program of other seconds, none of which is below `bound`."""
        bound = min(bound, objective)
        gap = relative_gap(objective, bound)
        return replace(self, objective=objective, bound=bound, gap=gap)

    def shared(self, ranks: int) -> SearchReport:
        """Return the report for a pipeline whose `ranks` share the work of all stages."""
        considered = tuple(
            replace(entry, seconds=None if entry.seconds is None else entry.seconds / ranks)
            for entry in self.considered
        )
        return replace(
            self,
            objective=self.objective / ranks,
            added_up=self.added_up / ranks,
            bound=self.bound / ranks,
            considered=considered,
        )
