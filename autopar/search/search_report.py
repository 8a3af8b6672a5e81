"""Account: what a search for layouts says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.mesh import Mesh
from autopar.solver.cp_sat_residual import relative_gap
from autopar.solver.solve import ProblemSizes

_SHARED = 0.01  # relative: what movements save at most by sharing steps


@dataclass(frozen=True)
class ConsideredMesh:
    """One mesh that was weighed."""

    mesh: Mesh
    # Predicted for a step or, where it says why it was not taken, that it takes at least.
    seconds: float | None
    memory: float | None
    why: str = ""  # why it was not solved or not taken


@dataclass(frozen=True)
class SearchReport:
    """The account of a search: how long, how good, how large, what else was weighed."""

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
        """The same, with something left that was not weighed, and might take as little."""
        return replace(self.made(self.objective, bound), interrupted=True)

    def taken(self, seconds: float) -> SearchReport:
        """The same of a plan that takes longer than what was found; or less, where movements share
        steps that the search adds up for each of them. Those of other plans may do so, too: where
        that is more than a little, nothing is known of them."""
        less = max(0.0, self.objective - seconds)
        bound = max(0.0, self.bound - less) if less <= _SHARED * seconds else 0.0
        gap = relative_gap(seconds, bound)
        return replace(self, objective=seconds, bound=bound, gap=gap)

    def lowered(self, bound: float) -> SearchReport:
        """The same, where some plans may take as little as `bound`."""
        return self.made(self.objective, max(0.0, min(self.bound, bound)))

    def made(self, objective: float, bound: float) -> SearchReport:
        """The same of a program that takes other seconds, none of which takes less than `bound`."""
        bound = min(bound, objective)
        gap = relative_gap(objective, bound)
        return replace(self, objective=objective, bound=bound, gap=gap)

    def shared(self, ranks: int) -> SearchReport:
        """The same of a pipeline, on whose `ranks` the work of all stages is done side by side."""
        considered = tuple(
            replace(one, seconds=None if one.seconds is None else one.seconds / ranks)
            for one in self.considered
        )
        return replace(
            self,
            objective=self.objective / ranks,
            added_up=self.added_up / ranks,
            bound=self.bound / ranks,
            considered=considered,
        )
