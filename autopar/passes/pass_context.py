"""Pass contexts: what every pass gets besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.captured import Captured
from autopar.collectives import Price
from autopar.mesh import Mesh
from autopar.search.decisions import Decisions


@dataclass(frozen=True)
class RewriteContext:
    """Hold the program that is rewritten, what was decided about it, and what collectives cost."""

    captured: Captured
    decisions: Decisions
    price: Price

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the decisions."""
        return self.decisions.mesh


@dataclass(frozen=True)
class ParameterCopies:
    """Name the parameters of which a rank's program reads copies, by their names in the model."""

    # The number of gathers and casts behind a parameter that the runtime does.
    runtime_copies: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)  # in which a copy comes
    step_long_groups: frozenset[int] = frozenset()  # the groups that stay to the end of a step


@dataclass(frozen=True)
class LocalContext:
    """Hold what a pass on one rank's program gets besides it."""

    global_graph: fx.Graph | None = None  # of all ranks, if this rank has the whole inputs
    mesh: Mesh | None = None  # of these ranks
    caller_sums: int = 0  # the caller completes sums among this many first results
    is_split: bool = False  # backward is split into input and weight gradients
    copies: ParameterCopies = ParameterCopies()
    is_differentiated_once: bool = False  # gradients have no gradients of their own
    compiled: bool = False  # a compiler makes the calls, which are to change nothing in place
